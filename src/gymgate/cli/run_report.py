"""What `gymgate run` shows: progress while it runs, and the closing table."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import click

from gymgate.cli.tally import BESIDE_THE_MEAN, Tally, all_reasons, print_tallies
from gymgate.rollout import Rollout, outcome_of

FIRST_LINE_S = 2.0
NEXT_LINES_S = 10.0


def count(tally: Tally, rollout: Rollout) -> None:
    """Add a rollout to its environment's tally."""
    result = outcome_of(rollout)
    tally.add(result.reason, result.reward)
    if rollout.error is not None:
        tally.reasons[one_line(f"{rollout.error.type}: {rollout.error.message}")] += 1
    elif result.reason == "masked":
        said = rollout.result or {}
        kind, why = said.get("failure_kind") or "no reason given", said.get("failure_reason") or ""
        tally.reasons[one_line(f"masked: {kind} {_without_key(str(why))}")] += 1


class Report:
    """Counts rollouts as they finish. `started` is when the first one was sent off."""

    def __init__(self) -> None:
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self.started = time.monotonic()
        self._ended = self.started

    def start(self) -> None:
        """The stack is ready: rates count from here."""
        self.started = self._ended = time.monotonic()

    def count(self, rollout: Rollout) -> None:
        count(self.tallies[rollout.environment], rollout)
        self._ended = time.monotonic()

    @property
    def rollouts(self) -> int:
        return sum(tally.rollouts for tally in self.tallies.values())

    @property
    def failed(self) -> int:
        return sum(tally.failed for tally in self.tallies.values())

    @property
    def reasons(self) -> Counter[str]:
        """Why rollouts failed or were masked, all environments together."""
        return all_reasons(self.tallies)

    @property
    def seconds(self) -> float:
        """From the first rollout's start to the last one's end."""
        return self._ended - self.started

    def rate(self, tally: Tally) -> float | None:
        """Rollouts per second; `None` before one has finished."""
        return tally.rollouts / self.seconds if self.seconds > 0 else None

    def as_dict(self, *, interrupted: bool, error: str | None) -> dict[str, Any]:
        """The closing table as JSON values."""
        environments = {
            name: {
                "rollouts": tally.rollouts,
                "ok": tally.ok,
                **{reason: tally.outcomes[reason] for reason in BESIDE_THE_MEAN},
                "mean_reward": tally.mean_reward,
                "rollouts_per_s": self.rate(tally),
            }
            for name, tally in sorted(self.tallies.items())
        }
        ended = {"seconds": self.seconds, "interrupted": interrupted, "error": error}
        return {"environments": environments, "reasons": dict(self.reasons), **ended}

    def print_table(self) -> None:
        """The table on stdout, then why rollouts failed or were masked, with counts, on stderr."""
        print_tallies(self.tallies, {name: self.rate(tally) for name, tally in self.tallies.items()})


class Progress(Protocol):
    """Told about each finished rollout."""

    def __call__(self, report: Report) -> None: ...


@contextmanager
def progress(total: int | None) -> Iterator[Progress]:
    """A bar on a terminal; elsewhere a line after two seconds and then every ten."""
    if not sys.stderr.isatty():
        yield _Lines(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda report: bar.update(task, completed=report.rollouts, description=_state(report))


class _Lines:
    def __init__(self, total: int | None) -> None:
        self._total = "" if total is None else f" of {total}"
        self._next = time.monotonic() + FIRST_LINE_S

    def __call__(self, report: Report) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + NEXT_LINES_S
            click.echo(f"{report.rollouts}{self._total} rollouts, {_state(report)}", err=True)


def _state(report: Report) -> str:
    rewards = [reward for tally in report.tallies.values() for reward in tally.rewards]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f}" if rewards else "no reward yet"
    return f"{mean}, {report.failed} failed" if report.failed else mean


def _without_key(text: str) -> str:
    """Rollouts that differ in their gateway URL only fail for one reason."""
    return re.sub(r"/ng-rollout/[^/\s]+", "", text)


def one_line(text: str, longest: int = 300) -> str:
    """On one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 3]}..."
