"""Rollouts as the dictionary that TRL's rollout functions return (contract: trl 1.16, `GRPOTrainer._generate`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from gymgate.integrations.training.figures import Attempt, metrics
from gymgate.rollout import Segment, outcome_of

SegmentChoice = Literal["longest", "last"]
"""Which segment of a rollout with several stands for it: the one with most sampled ids, or the last."""


def to_batch(
    attempts: Sequence[Attempt],
    *,
    filler_id: int,
    segment_choice: SegmentChoice = "longest",
    score_truncated: bool = False,
) -> dict[str, Any]:
    """Lists with one element per prompt, in order.

    `prompt_ids`, `completion_ids`, `logprobs`, `env_mask` are of one length per element; `logprobs` is `None` where an id
    was not sampled. A rollout that is left out of training (see `outcome_of`) keeps its place with reward `None` and a mask of
    zeros, so it enters neither the baseline nor the loss; where nothing was sampled its completion is one masked `filler_id`.
    """
    scores = [outcome_of(attempt.rollout, score_truncated=score_truncated).taught for attempt in attempts]
    rows = [
        _row(attempt, filler_id, segment_choice, scored=reward is not None)
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


def _row(attempt: Attempt, filler_id: int, segment_choice: SegmentChoice, *, scored: bool) -> Segment:
    if not attempt.segments:
        return Segment(prompt_ids=attempt.shown_ids or [filler_id], completion_ids=[filler_id], mask=[0])
    longest = max(attempt.segments, key=lambda candidate: sum(candidate.mask))
    segment = attempt.segments[-1] if segment_choice == "last" else longest
    return segment if scored else segment.model_copy(update={"mask": [0] * len(segment.mask)})
