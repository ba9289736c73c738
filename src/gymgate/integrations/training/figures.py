"""A rollout as trainers see it: what it samples, the reward it teaches with, the figures they log. Plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from gymgate.errors import ErrorKind
from gymgate.rollout import Rollout, Segment, outcome_of

KINDS: Final[tuple[str, ...]] = get_args(ErrorKind)


@dataclass(frozen=True)
class Attempt:
    """One prompt's rollout."""

    rollout: Rollout
    segments: list[Segment]
    turns: int
    """Model calls."""
    prefix_misses: int
    """Those, after the first, whose prompt extends no earlier call's exact ids."""
    shown_ids: list[int]
    """The prompt, for a rollout in which the policy sampled nothing."""


def metrics(attempt: Attempt, row: Segment | None = None) -> dict[str, float]:
    """Figures of one rollout, by name; of the figure names of two rollouts, those that both have can be averaged.

    `row` is what is delivered of it, where that is not all.
    """
    rollout, result = attempt.rollout, outcome_of(attempt.rollout)
    sampled = sum(sum(segment.mask) for segment in attempt.segments)
    kind = None if rollout.error is None else rollout.error.kind
    values = {
        "turns": float(attempt.turns),
        "segments": float(len(attempt.segments)),
        "prefix_misses": float(attempt.prefix_misses),
        "truncated": float(rollout.status == "truncated"),
        "unscored": float(result.reason == "unscored"),
        "masked": float(result.reason == "masked"),
        "failed": float(result.reason == "failed"),
        **{f"failed_{name}": float(kind == name) for name in KINDS},
        "latency_s": rollout.timing.total_s,
    }
    if row is not None and sampled and result.trained:
        values["delivered_fraction"] = sum(row.mask) / sampled
    if result.reward is not None:
        values["reward"] = result.reward
    return values


def means(figures: Sequence[Mapping[str, float]], environments: Sequence[str]) -> dict[str, float]:
    """Each figure over all rollouts that have it, as `NAME`, and over those of one environment, as `ENVIRONMENT/NAME`."""
    return {name: sum(values) / len(values) for name, values in gathered(figures, environments).items()}


def gathered(figures: Sequence[Mapping[str, float]], environments: Sequence[str]) -> dict[str, list[float]]:
    """The values of each figure, over all rollouts and by environment; see `means`."""
    found: dict[str, list[float]] = {}
    for values, environment in zip(figures, environments, strict=True):
        for name, value in values.items():
            found.setdefault(name, []).append(value)
            if environment:
                found.setdefault(f"{environment}/{name}", []).append(value)
    return found
