"""Watching a verifiers eval from outside, and the closing table and next steps, from the traces it saved."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import orjson

from gymgate.cli.metrics_tables import print_causes, print_results
from gymgate.cli.output import log
from gymgate.collection.metrics import summary_rows
from gymgate.collection.progress import EnvironmentMetrics
from gymgate.collection.tasks import CollectedTasks
from gymgate.rollout import outcome_of

TRACES = "traces.jsonl"
PROGRESS_S = 10.0
DEPRECATION = "vf-eval will be deprecated"
"""How verifiers' notice about its own command begins."""


@dataclass
class TimedMetrics(EnvironmentMetrics):
    """With the time that this eval took, from its traces."""

    start: float = math.inf
    end: float = 0.0
    timed: int = 0
    """Rollouts between `start` and `end`: those of this eval, without those that a resumed run kept."""

    @property
    def rate(self) -> float | None:
        """Rollouts per second from the first one's start to the last one's end."""
        return self.timed / (self.end - self.start) if self.end > self.start else None


class RunWatcher(logging.Filter):
    """Reads from the log of verifiers' runner where the run is and how many rollouts it makes; drops a notice."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Path | None = None
        self.wanted: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        args: Any = record.args or ()
        if record.msg.startswith("results: "):
            self.run = Path(str(args[0]))
        elif record.msg.startswith("running "):
            self.wanted = int(args[0]) * int(args[1])
        elif record.msg.startswith("resuming "):
            self.wanted = int(args[2])
        return not record.msg.startswith(DEPRECATION)


@contextmanager
def watch() -> Iterator[RunWatcher]:
    """Watch the eval that runs inside; away from a terminal, report its progress on stderr every ten seconds."""
    watcher, done = RunWatcher(), threading.Event()
    runner = logging.getLogger("verifiers.v1.cli.eval.runner")
    runner.addFilter(watcher)
    if not sys.stdout.isatty():
        threading.Thread(target=_report_progress, args=(watcher, done), daemon=True).start()
    try:
        yield watcher
    finally:
        done.set()
        runner.removeFilter(watcher)


def _report_progress(watcher: RunWatcher, done: threading.Event) -> None:
    while not done.wait(PROGRESS_S):
        if watcher.run is not None and (traces := watcher.run / TRACES).exists():
            with traces.open("rb") as file:
                lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
            log(f"{lines}{f' of {watcher.wanted}' if watcher.wanted else ''} rollouts finished")


def read_metrics(run: Path, since: float = 0.0) -> tuple[dict[str, TimedMetrics], CollectedTasks]:
    """Return what came of each environment's rollouts, and of each task's; rates are of those that began after `since`."""
    environments: defaultdict[str, TimedMetrics] = defaultdict(TimedMetrics)
    tasks = CollectedTasks()
    with (run / TRACES).open("rb") as file:
        for line in file:
            if line.strip():
                _count(environments, tasks, orjson.loads(line), since)
    return dict(sorted(environments.items())), tasks


def _count(
    environments: defaultdict[str, TimedMetrics],
    tasks: CollectedTasks,
    episode: dict[str, Any],
    since: float,
) -> None:
    data = episode.get("task", {}).get("data", {})
    name = data.get("gym", {}).get("environment") or episode.get("env", {}).get("id") or "?"
    metrics, row_key = environments[name], str(data.get("id") or data.get("idx"))
    metrics.causes.update(_line(error) for error in episode.get("errors", []))
    for trace in episode.get("traces") or [{}]:
        if (start := trace.get("timing", {}).get("start", 0.0)) > since:
            metrics.timed += 1
            metrics.start = min(metrics.start, start)
            metrics.end = max(metrics.end, _end(trace["timing"]))
        rollout = _rollout(trace)
        outcome = outcome_of(rollout)
        metrics.add(outcome.reason, outcome.reward)
        tasks.add({"environment": name, "row_key": row_key, **rollout})
        if outcome.reason == "failed":
            metrics.causes.update(_line(error) for error in trace.get("errors", [])[-1:])


def _rollout(trace: dict[str, Any]) -> dict[str, Any]:
    """Return status and reward of a trace, as a line of a run has them; parts have weight 0."""
    if not trace.get("ok"):
        return {"status": "failed"}
    weighted = [
        reward["score"] * reward.get("weight", 1.0)
        for reward in trace.get("rewards", {}).values()
        if reward and reward.get("weight", 1.0)
    ]
    rollout = trace.get("info", {}).get("nemo_gym") or {"status": "completed"}
    return {**rollout, "reward": sum(weighted) if weighted else None}


def _end(timing: dict[str, Any]) -> float:
    return max((span.get("end", 0.0) for span in timing.values() if isinstance(span, dict)), default=0.0)


def _line(error: dict[str, Any]) -> str:
    return " ".join(f"{error.get('type')}: {error.get('message')}".split())[:300]


def print_report(
    environments: Mapping[str, TimedMetrics],
    tasks: CollectedTasks,
    run: Path,
    table: Mapping[str, Any],
    *,
    replayed: bool = False,
    complete: bool = True,
) -> None:
    """Print the closing table, why rollouts failed, where the results are, and what to do next."""
    click.echo()
    rates = {name: metrics.rate for name, metrics in environments.items()}
    rows = [
        {**row, "rollouts_per_s": rates.get(row["environment"])} for row in summary_rows(tasks, table["ks"])
    ]
    print_results(rows, replayed=replayed, **table)
    print_causes(environments)
    click.echo(f"results: {run}")
    log(f"  look:   {run / TRACES} has one rollout per line, {run / 'logs/latest/eval.log'} is the log")
    if not complete:
        log(f"  resume: gymgate eval run --resume {run}  (runs what failed or is missing)")
    if replayed:
        log("  next:   the same with your model: add -b http://host:8000/v1 -m MODEL")
    if sys.stdout.isatty():
        log(f'  note:   "{DEPRECATION}" is about verifiers\' own command; gymgate eval run keeps working')
