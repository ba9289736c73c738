"""Rollouts as the dictionary that TRL's rollout functions return (contract: trl 1.16, `GRPOTrainer._generate`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from gymgate.errors import ErrorKind
from gymgate.rollout import Rollout, Segment
from gymgate.tokens import TokenTurn, extension_drift

Fold = Literal["longest", "last"]
"""Which segment of a rollout with several stands for it: the one with most sampled ids, or the last."""
KINDS: Final[tuple[str, ...]] = get_args(ErrorKind)


@dataclass(frozen=True)
class Attempt:
    """One prompt's rollout."""

    rollout: Rollout
    segments: list[Segment]
    turns: list[TokenTurn]
    shown_ids: list[int]
    """The prompt, for a rollout in which the policy sampled nothing."""


def to_batch(
    attempts: Sequence[Attempt], *, filler_id: int, fold: Fold = "longest", score_truncated: bool = False
) -> dict[str, Any]:
    """Lists with one element per prompt, in order.

    `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` are of one length per element; `logprobs` is `None` where an id was
    not sampled. A rollout without score (see `score`) keeps its place with reward `None` and a mask of zeros, so it enters
    neither the baseline nor the loss; where nothing was sampled its completion is one masked `filler_id`.
    """
    scores = [score(attempt.rollout, truncated=score_truncated) for attempt in attempts]
    rows = [
        _row(attempt, filler_id, fold, scored=reward is not None)
        for attempt, reward in zip(attempts, scores, strict=True)
    ]
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.completion_ids for row in rows],
        "logprobs": [row.logprobs or [None] * len(row.mask) for row in rows],
        "env_mask": [row.mask for row in rows],
        "env_reward": scores,
        "rollout_metrics": [metrics(attempt, row) for attempt, row in zip(attempts, rows, strict=True)],
    }


def score(rollout: Rollout, *, truncated: bool = False) -> float | None:
    """The reward to learn from: `None` for failed and masked rollouts, and for truncated ones unless `truncated`."""
    counted = ("completed", "truncated") if truncated else ("completed",)
    return rollout.reward if rollout.status in counted else None


def _row(attempt: Attempt, filler_id: int, fold: Fold, *, scored: bool) -> Segment:
    if not attempt.segments:
        return Segment(prompt_ids=attempt.shown_ids or [filler_id], completion_ids=[filler_id], mask=[0])
    longest = max(attempt.segments, key=lambda candidate: sum(candidate.mask))
    segment = attempt.segments[-1] if fold == "last" else longest
    return segment if scored else segment.model_copy(update={"mask": [0] * len(segment.mask)})


def metrics(attempt: Attempt, row: Segment | None = None) -> dict[str, float]:
    """Figures of one rollout, by name; of the figure names of two rollouts, those that both have can be averaged.

    `row` is what is delivered of it, where that is not all.
    """
    rollout = attempt.rollout
    sampled = sum(sum(segment.mask) for segment in attempt.segments)
    kind = None if rollout.error is None else rollout.error.kind
    values = {
        "turns": float(len(attempt.turns)),
        "segments": float(len(attempt.segments)),
        "drift": float(extension_drift(attempt.turns)),
        "truncated": float(rollout.status == "truncated"),
        "masked": float(rollout.status == "masked"),
        "failed": float(rollout.status == "failed"),
        **{f"failed_{name}": float(kind == name) for name in KINDS},
        "latency_s": rollout.timing.total_s,
    }
    if row is not None and sampled and rollout.status == "completed":
        values["delivered_fraction"] = sum(row.mask) / sampled
    if rollout.reward is not None:
        values["reward"] = rollout.reward
    return values


def means(figures: Sequence[dict[str, float]], environments: Sequence[str]) -> dict[str, float]:
    """Each figure over all rollouts that have it, as `NAME`, and over those of one environment, as `ENVIRONMENT/NAME`."""
    gathered: dict[str, list[float]] = {}
    for values, environment in zip(figures, environments, strict=True):
        for name, value in values.items():
            gathered.setdefault(name, []).append(value)
            if environment:
                gathered.setdefault(f"{environment}/{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in gathered.items()}
