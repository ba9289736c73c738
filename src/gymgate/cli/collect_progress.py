"""What `gymgate collect` shows while it runs: a bar on a terminal, elsewhere a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import orjson

from gymgate.collection.run import Collection
from gymgate.collection.tally import Tally
from gymgate.rollout.outcome import Reason

FIRST_LINE_S = 5.0
NEXT_LINES_S = 30.0
MOST_REPLICAS = 4
"""That are named in a line."""
BESIDE_THE_MEAN: tuple[Reason, ...] = ("truncated", "unscored", "masked")
"""Outcomes that are counted beside it; truncated rollouts are in it too."""
Show = Callable[[Tally], None]


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[tuple[Show, Callable[[str], None]]]:
    """A function to tell of each change, and one that prints a line beside the bar."""
    if quiet:
        yield (lambda tally: None), _say
    elif sys.stderr.isatty():
        yield from _bar()
    else:
        yield Lines(), _say


def _bar() -> Iterator[tuple[Show, Callable[[str], None]]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(tally: Tally) -> None:
            bar.update(task, total=tally.total, completed=tally.done, description=state(tally))

        yield show, lambda message: console.print(message, markup=False, highlight=False, soft_wrap=True)


class Lines:
    """A line after five seconds and then every thirty."""

    def __init__(self) -> None:
        self._next = time.monotonic() + FIRST_LINE_S

    def __call__(self, tally: Tally) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + NEXT_LINES_S
            _say(", ".join(filter(None, (f"{tally.done} of {tally.total} rollouts", state(tally)))))


def close(run: Collection, as_json: bool, say: Callable[[str], None]) -> None:
    """The closing counts, as lines or as JSON on stdout."""
    tally = run.tally
    if as_json:
        value = {
            "output": str(run.directory),
            "total": tally.total,
            "resumed": tally.resumed,
            "finished": tally.finished,
            "failed": tally.failed + tally.given_up_before,
            "left": tally.left,
            "invalid_rows": len(run.plan.invalid),
            "mean_reward": tally.mean_reward,
            "counted": tally.counted,
            **{str(name): tally.reasons[name] for name in BESIDE_THE_MEAN},
            "failed_attempts": dict(tally.failures),
        }
        click.echo(orjson.dumps(value))
        return
    left = f", {tally.left} left" if tally.left else ""
    shown = state(tally)
    say(f"{run.directory}: {tally.done} of {tally.total} rollouts{left}{f' ({shown})' if shown else ''}")
    for reason, count in tally.failures.most_common(5):
        say(f"{count} x {reason} (see {run.directory}/failures.jsonl)")


def state(tally: Tally) -> str:
    """Rate, time left, mean reward, failures, tokens: what is known of them."""
    parts = []
    if (rate := tally.rate) is not None:
        parts.append(f"{rate:.1f}/s")
    if (eta := tally.eta_s) is not None and tally.left:
        parts.append(f"{duration(eta)} left")
    if (mean := tally.mean_reward) is not None:
        parts.append(f"mean reward {mean:.3f}")
    parts += [f"{count} {name}" for name in BESIDE_THE_MEAN if (count := tally.reasons[name])]
    if tally.failed:
        parts.append(f"{tally.failed} failed")
    if (tokens := tally.token_rate) is not None:
        parts.append(f"{tokens:,.0f} tokens/s{_by_replica(tally)}")
    return ", ".join(parts)


def _by_replica(tally: Tally) -> str:
    """` (a:8000 310, b:8000 295, c:8000 left out)`; of many, only those that are left out and the range of the others."""
    shown = {url.partition("//")[2].removesuffix("/v1"): pace for url, pace in tally.replicas.items()}
    rates = {name: pace.token_rate for name, pace in shown.items() if pace.healthy}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    out = [f"{name} left out" for name, pace in shown.items() if not pace.healthy]
    if len(known) > MOST_REPLICAS:
        parts = [f"{min(known.values()):,.0f}-{max(known.values()):,.0f} on each of {len(known)} replicas"]
    else:
        parts = [f"{name} {rate:,.0f}" for name, rate in known.items()]
    if len(out) > MOST_REPLICAS:
        out = [f"{len(out)} left out"]
    return f" ({', '.join([*parts, *out])})" if known or out else ""


def duration(seconds: float) -> str:
    """`7 s`, `3:05` or `2:03:05`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, seconds_left = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def _say(message: str) -> None:
    click.echo(message, err=True)
