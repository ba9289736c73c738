"""What came of the rollouts of each environment, and the table that ends `gymgate run` and `gymgate eval run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import click

from gymgate.rollout.outcome import Reason

SHOWN_REASONS = 5
BESIDE_THE_MEAN: tuple[Reason, ...] = ("failed", "masked", "unscored", "truncated")
"""Outcomes with a column each; of these only truncated rollouts are in the mean."""
COLUMNS = ("environment", "rollouts", "ok", *BESIDE_THE_MEAN, "mean reward", "rollouts/s")


@dataclass
class Tally:
    """What came of one environment's rollouts."""

    rewards: list[float] = field(default_factory=list)
    """Those that count."""
    outcomes: Counter[Reason] = field(default_factory=Counter)
    """Rollouts by outcome."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why rollouts failed or were masked."""

    def add(self, reason: Reason, reward: float | None) -> None:
        """Count a rollout by its outcome; `reward` is `None` where none counts."""
        self.outcomes[reason] += 1
        if reward is not None:
            self.rewards.append(reward)

    @property
    def rollouts(self) -> int:
        return self.outcomes.total()

    @property
    def failed(self) -> int:
        return self.outcomes["failed"]

    @property
    def ok(self) -> int:
        """Rollouts that did not fail, scored or not."""
        return self.rollouts - self.failed

    @property
    def mean_reward(self) -> float | None:
        """Over the rewards that count; `None` without any."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


def all_reasons(tallies: Mapping[str, Tally]) -> Counter[str]:
    """Why rollouts failed or were masked, all environments together."""
    return sum((tally.reasons for tally in tallies.values()), Counter())


def print_tallies(tallies: Mapping[str, Tally], rates: Mapping[str, float | None]) -> None:
    """The table on stdout, then why rollouts failed or were masked, with counts, on stderr.

    `rates` are rollouts per second by environment.
    """
    rows = [COLUMNS, *(_cells(name, tally, rates[name]) for name, tally in sorted(tallies.items()))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        aligned = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
        click.echo("  ".join([name.ljust(widths[0]), *aligned]))
    reasons = all_reasons(tallies)
    shown = reasons.most_common(SHOWN_REASONS)
    for reason, count in shown:
        click.echo(f"{count} x {reason}", err=True)
    if rest := len(reasons) - len(shown):
        click.echo(f"and {rest} more reasons", err=True)


def _cells(name: str, tally: Tally, rate: float | None) -> tuple[str, ...]:
    counts = (tally.rollouts, tally.ok, *(tally.outcomes[reason] for reason in BESIDE_THE_MEAN))
    return (name, *map(str, counts), _number(tally.mean_reward, 3), _number(rate, 1))


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
