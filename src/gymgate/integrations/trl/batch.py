"""Rollouts as the dictionary that TRL's rollout functions return (contract: trl 1.16, `GRPOTrainer._generate`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gymgate.rollout import Rollout, Segment
from gymgate.tokens import TokenTurn, extension_drift

Fold = Literal["longest", "last"]
"""Which segment of a rollout with several stands for it: the one with most sampled ids, or the last."""


@dataclass(frozen=True)
class Attempt:
    """One prompt's rollout."""

    rollout: Rollout
    segments: list[Segment]
    turns: list[TokenTurn]
    shown_ids: list[int]
    """The prompt, for a rollout in which the policy sampled nothing."""


def to_batch(attempts: Sequence[Attempt], *, filler_id: int, fold: Fold = "longest") -> dict[str, Any]:
    """Lists with one element per prompt, in order.

    `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` are of one length per element; `logprobs` is `None` where an id was
    not sampled. A rollout without score (failed, or masked by Gym) keeps its place with reward `None` and a mask of zeros, so
    it enters neither the baseline nor the loss; where nothing was sampled its completion is one masked `filler_id`.
    """
    rows = [_row(attempt, filler_id, fold) for attempt in attempts]
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.completion_ids for row in rows],
        "logprobs": [row.logprobs or [None] * len(row.mask) for row in rows],
        "env_mask": [row.mask for row in rows],
        "env_reward": [score(attempt.rollout) for attempt in attempts],
        "rollout_metrics": [metrics(attempt, row) for attempt, row in zip(attempts, rows, strict=True)],
    }


def score(rollout: Rollout) -> float | None:
    """The reward to learn from: `None` for failed and masked rollouts."""
    return rollout.reward if rollout.status in ("completed", "truncated") else None


def _row(attempt: Attempt, filler_id: int, fold: Fold) -> Segment:
    if not attempt.segments:
        return Segment(prompt_ids=attempt.shown_ids or [filler_id], completion_ids=[filler_id], mask=[0])
    longest = max(attempt.segments, key=lambda candidate: sum(candidate.mask))
    segment = attempt.segments[-1] if fold == "last" else longest
    if score(attempt.rollout) is None:
        return segment.model_copy(update={"mask": [0] * len(segment.mask)})
    return segment


def metrics(attempt: Attempt, row: Segment) -> dict[str, float]:
    """Figures of one rollout, by name; `NAME/ENVIRONMENT` beside `NAME` is made where they are logged."""
    rollout = attempt.rollout
    sampled = sum(sum(segment.mask) for segment in attempt.segments)
    values = {
        "turns": float(len(attempt.turns)),
        "segments": float(len(attempt.segments)),
        "drift": float(extension_drift(attempt.turns)),
        "truncated": float(rollout.status == "truncated"),
        "masked": float(rollout.status == "masked"),
        "failed": float(rollout.status == "failed"),
        "latency_s": rollout.timing.total_s,
    }
    if sampled and rollout.status != "failed":
        values["delivered_fraction"] = sum(row.mask) / sampled
    if rollout.error is not None:
        values[f"failed_{rollout.error.kind}"] = 1.0
    if rollout.reward is not None:
        values["reward"] = rollout.reward
    return values


def failure_lines(attempts: Sequence[Attempt]) -> list[str]:
    """Each distinct failure once, with its count, the most frequent first."""
    errors = [attempt.rollout.error for attempt in attempts if attempt.rollout.error is not None]
    counts = Counter(f"{error.kind}: {error.message}" for error in errors)
    return [f"{count} x {line}" for line, count in counts.most_common()]
