"""Watching a verifiers eval from outside, and its closing table, read from the traces it saved."""

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

from gymgate.cli.tally import Tally, print_tallies
from gymgate.rollout import outcome_of
from gymgate.rollout.outcome import Reason

TRACES = "traces.jsonl"
HEARTBEAT_S = 10.0


@dataclass
class TimedTally(Tally):
    """With the time that this run took, which its traces say."""

    start: float = math.inf
    end: float = 0.0
    timed: int = 0
    """Rollouts between `start` and `end`: those of this run, not ones that a resumed run kept."""

    @property
    def rate(self) -> float | None:
        """Rollouts per second from the first one's start to the last one's end."""
        return self.timed / (self.end - self.start) if self.end > self.start else None


class RunWatcher(logging.Handler):
    """Learns from the runner's own log where the run writes and how many rollouts it owes."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.path: Path | None = None
        self.owed: int | None = None

    def emit(self, record: logging.LogRecord) -> None:
        args: Any = record.args or ()
        if record.msg.startswith("results: "):
            self.path = Path(str(args[0]))
        elif record.msg.startswith("running "):
            self.owed = int(args[0]) * int(args[1])
        elif record.msg.startswith("resuming "):
            self.owed = int(args[2])


@contextmanager
def watch() -> Iterator[RunWatcher]:
    """Watch the eval that runs inside; away from a terminal, count its rollouts on stderr every ten seconds."""
    watcher, done = RunWatcher(), threading.Event()
    source = logging.getLogger("verifiers.v1.cli.eval.runner")
    source.addHandler(watcher)
    if not sys.stdout.isatty():
        threading.Thread(target=_heartbeat, args=(watcher, done), daemon=True).start()
    try:
        yield watcher
    finally:
        done.set()
        source.removeHandler(watcher)


def _heartbeat(watcher: RunWatcher, done: threading.Event) -> None:
    while not done.wait(HEARTBEAT_S):
        if watcher.path is not None and (traces := watcher.path / TRACES).exists():
            with traces.open("rb") as file:
                lines = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
            click.echo(
                f"{lines} rollouts finished" + (f", {watcher.owed} asked for" if watcher.owed else ""),
                err=True,
            )


def read_tallies(path: Path, since: float = 0.0) -> dict[str, TimedTally]:
    """Environment -> what came of its rollouts, from a run directory; rates of those begun after `since`."""
    tallies: defaultdict[str, TimedTally] = defaultdict(TimedTally)
    with (path / TRACES).open("rb") as file:
        for line in file:
            if line.strip():
                _count(tallies, orjson.loads(line), since)
    return dict(sorted(tallies.items()))


def _count(tallies: defaultdict[str, TimedTally], episode: dict[str, Any], since: float) -> None:
    data = episode.get("task", {}).get("data", {})
    tally = tallies[data.get("gym", {}).get("environment") or episode.get("env", {}).get("id") or "?"]
    traces = episode.get("traces") or [{}]
    tally.reasons.update(_line(error) for error in episode.get("errors", []))
    for trace in traces:
        if (start := trace.get("timing", {}).get("start", 0.0)) > since:
            tally.timed += 1
            tally.start = min(tally.start, start)
            tally.end = max(tally.end, _end(trace["timing"]))
        if not trace.get("ok"):
            tally.add("failed", None)
            tally.reasons.update(_line(error) for error in trace.get("errors", [])[-1:])
        else:
            tally.add(*_scored(trace))


def _scored(trace: dict[str, Any]) -> tuple[Reason, float | None]:
    """The outcome of a trace that did not fail, and verifiers' reward if it counts: parts of weight 0 are no reward."""
    weighted = [
        reward["score"] * reward.get("weight", 1.0)
        for reward in trace.get("rewards", {}).values()
        if reward and reward.get("weight", 1.0)
    ]
    rollout = trace.get("info", {}).get("nemo_gym") or {"status": "completed"}
    result = outcome_of({**rollout, "reward": sum(weighted) if weighted else None})
    return result.reason, result.reward


def _end(timing: dict[str, Any]) -> float:
    return max((span.get("end", 0.0) for span in timing.values() if isinstance(span, dict)), default=0.0)


def _line(error: dict[str, Any]) -> str:
    return " ".join(f"{error.get('type')}: {error.get('message')}".split())[:300]


def print_report(tallies: Mapping[str, TimedTally], path: Path) -> None:
    """The closing table, the reasons of failure with their counts, and where the results are."""
    click.echo()
    print_tallies(tallies, {name: tally.rate for name, tally in tallies.items()})
    click.echo(f"results: {path}")
