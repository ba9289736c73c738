"""Rollouts as what verl's agent loops return (contract: verl 0.9.1, `AgentLoopOutput`). Imports no verl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gymgate.integrations.training.rollouts import KINDS, SampledRollout, filled_logprobs, rollout_metrics
from gymgate.rollouts import Segment

_EMPTY_LISTS = ("turn_scores", "tool_rewards")
"""Extra fields that verl's own agent loops always have."""
_NOT_FOR_VALIDATION = ("failed", "masked", "unscored", "reward", *(f"failed_{kind}" for kind in KINDS))
"""Metrics that say nothing of a rollout that gave an output, or that not every such rollout has."""


def to_outputs(
    sampled: SampledRollout, reward: float, parts: Mapping[str, float | None] | None = None
) -> list[dict[str, Any]]:
    """Return the arguments of one `AgentLoopOutput` per segment, in order.

    Every output has the rollout's reward: verl computes the baseline from a session's last output, and trains all of
    them with its advantage. `parts` of the reward go to verl's validation log. Ids that the policy did not sample have mask 0
    and logprob 0.0, which no loss reads.

    Raises `TokenDataError` for a segment in which only some turns have logprobs.
    """
    timing, extra = sampled.rollout.timing, {**reward_extra_info(sampled), **(parts or {})}
    return [
        {
            "prompt_ids": segment.prompt_ids,
            "response_ids": segment.completion_ids,
            "response_mask": segment.mask,
            "response_logprobs": filled_logprobs(segment),
            "reward_score": reward,
            "num_turns": sampled.turns,
            "metrics": {
                "generate_sequences": timing.model_s,
                "tool_calls": max(0.0, timing.total_s - timing.model_s),
            },
            "extra_fields": {
                "reward_extra_info": dict(extra),
                **{name: [] for name in _EMPTY_LISTS},
                **dict(
                    zip(("min_global_steps", "max_global_steps"), segment.policy_version or (), strict=False)
                ),
            },
        }
        for segment in sampled.segments
    ]


def reward_extra_info(sampled: SampledRollout) -> dict[str, float]:
    """Return metrics for verl's validation log; every rollout of every environment has the same names."""
    metrics = rollout_metrics(sampled)
    return {
        name: value
        for name, value in metrics.items()
        if name not in _NOT_FOR_VALIDATION and not name.startswith("reward/")
    }


def fitting(segments: Sequence[Segment], prompt_length: int, response_length: int) -> Segment | None:
    """Return the segment with most sampled ids among those that fit into these lengths; `None` if none fits."""
    candidates = [
        segment
        for segment in segments
        if len(segment.prompt_ids) <= prompt_length and len(segment.completion_ids) <= response_length
    ]
    return max(candidates, key=lambda segment: sum(segment.mask), default=None)
