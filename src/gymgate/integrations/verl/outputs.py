"""Rollouts as what verl's agent loops return (contract: verl 0.9.1, `AgentLoopOutput`). Plain values; nothing imports verl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymgate.errors import TokenDataError
from gymgate.integrations.training.figures import KINDS, Attempt, metrics
from gymgate.rollout import Segment

SEQUENCE = ("turn_scores", "tool_rewards")
"""Lists that verl's own agent loops always have among their extra fields."""


def to_outputs(attempt: Attempt, reward: float) -> list[dict[str, Any]]:
    """The arguments of one `AgentLoopOutput` per segment, in order.

    Every output carries the rollout's reward: verl takes the baseline from a session's last output, and trains them all with its
    advantage. Ids that the policy did not sample have mask 0 and logprob 0.0, which no loss reads.

    Raises `TokenDataError` for a segment of which some turns have logprobs and others have not.
    """
    extra = reward_extra_info(attempt)
    return [_output(attempt, segment, reward, extra) for segment in attempt.segments]


def reward_extra_info(attempt: Attempt) -> dict[str, float]:
    """Figures of a rollout for verl's validation metrics; the same names for every rollout, whatever the environment."""
    figures = metrics(attempt)
    dropped = ("failed", "masked", "unscored", "reward", *(f"failed_{kind}" for kind in KINDS))
    return {name: value for name, value in figures.items() if name not in dropped}


def _output(attempt: Attempt, segment: Segment, reward: float, extra: Mapping[str, float]) -> dict[str, Any]:
    timing = attempt.rollout.timing
    return {
        "prompt_ids": segment.prompt_ids,
        "response_ids": segment.completion_ids,
        "response_mask": segment.mask,
        "response_logprobs": _filled(segment),
        "reward_score": reward,
        "num_turns": attempt.turns,
        "metrics": {
            "generate_sequences": timing.model_s,
            "tool_calls": max(0.0, timing.total_s - timing.model_s),
        },
        "extra_fields": {
            "reward_extra_info": dict(extra),
            **{name: [] for name in SEQUENCE},
            **_versions(segment),
        },
    }


def _filled(segment: Segment) -> list[float] | None:
    if segment.logprobs is None:
        return None
    known = list(zip(segment.mask, segment.logprobs, strict=True))
    if any(on and value is None for on, value in known):
        raise TokenDataError("the engine gave logprobs for some sampled ids of a rollout and not for others")
    return [0.0 if value is None else value for _, value in known]


def _versions(segment: Segment) -> dict[str, int]:
    if segment.policy_version is None:
        return {}
    return dict(zip(("min_global_steps", "max_global_steps"), segment.policy_version, strict=True))


def fitting(segments: Sequence[Segment], prompt_length: int, response_length: int) -> Segment | None:
    """For a worker that takes one row of fixed lengths: the segment with most sampled ids among those that fit."""
    held = [
        segment
        for segment in segments
        if len(segment.prompt_ids) <= prompt_length and len(segment.completion_ids) <= response_length
    ]
    return max(held, key=lambda segment: sum(segment.mask), default=None)
