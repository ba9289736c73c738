"""What `gymgate run` shows: progress while it runs, and the closing table."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import click

from gymgate.rollout import Rollout

FIRST_LINE_S = 2.0
NEXT_LINES_S = 10.0
SHOWN_REASONS = 5
COLUMNS = ("environment", "rollouts", "ok", "failed", "unscored", "mean reward", "rollouts/s")


@dataclass
class Tally:
    """What came of one environment's rollouts."""

    rollouts: int = 0
    failed: int = 0
    rewards: list[float] = field(default_factory=list)
    """Of those that were scored. What NeMo Gym gives a masked rollout (its judge failed, say) is no score."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why rollouts failed or were masked."""

    def count(self, rollout: Rollout) -> None:
        self.rollouts += 1
        if rollout.error is not None:
            self.failed += 1
            self.reasons[one_line(f"{rollout.error.type}: {rollout.error.message}")] += 1
        elif rollout.status == "masked":
            said = rollout.result or {}
            kind, why = said.get("failure_kind") or "no reason given", said.get("failure_reason") or ""
            self.reasons[one_line(f"masked: {kind} {_without_key(str(why))}")] += 1
        elif rollout.reward is not None:
            self.rewards.append(rollout.reward)

    @property
    def mean_reward(self) -> float | None:
        """Over the scored rollouts; `None` without any."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


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
        self.tallies[rollout.environment].count(rollout)
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
        return sum((tally.reasons for tally in self.tallies.values()), Counter())

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
                "ok": tally.rollouts - tally.failed,
                "failed": tally.failed,
                "unscored": tally.rollouts - tally.failed - len(tally.rewards),
                "mean_reward": tally.mean_reward,
                "rollouts_per_s": self.rate(tally),
            }
            for name, tally in sorted(self.tallies.items())
        }
        ended = {"seconds": self.seconds, "interrupted": interrupted, "error": error}
        return {"environments": environments, "reasons": dict(self.reasons), **ended}

    def print_table(self) -> None:
        """The table on stdout, then why rollouts failed or were masked, with counts, on stderr."""
        rows = [COLUMNS, *(self._cells(name, tally) for name, tally in sorted(self.tallies.items()))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *numbers in rows:
            aligned = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
            click.echo("  ".join([name.ljust(widths[0]), *aligned]))
        shown = self.reasons.most_common(SHOWN_REASONS)
        for reason, count in shown:
            click.echo(f"{count} x {reason}", err=True)
        if rest := len(self.reasons) - len(shown):
            click.echo(f"and {rest} more reasons", err=True)

    def _cells(self, name: str, tally: Tally) -> tuple[str, ...]:
        ok = tally.rollouts - tally.failed
        counts = (tally.rollouts, ok, tally.failed, ok - len(tally.rewards))
        return (name, *map(str, counts), _number(tally.mean_reward, 3), _number(self.rate(tally), 1))


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


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
