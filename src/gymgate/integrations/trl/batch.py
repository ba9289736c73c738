"""Rollouts as TRL's `GRPOTrainer` takes them (contract: trl 1.15 and 1.16, `GRPOTrainer._generate`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from gymgate.core.errors import ConfigError
from gymgate.integrations.training.rollouts import (
    SampledRollout,
    filler_segment,
    masked,
    rollout_metrics,
    values_by_metric,
)
from gymgate.integrations.training.spec import REWARD, weighted_reward
from gymgate.rollouts import Rollout, Segment, outcome_of

SegmentChoice = Literal["longest", "last"]
"""The segment that stands for a rollout with several: the one with most sampled ids, or the last."""
OWN_REWARD: Mapping[str, float] = MappingProxyType({REWARD: 1.0})


def to_batch(
    rollouts: Sequence[SampledRollout],
    *,
    filler_id: int,
    segment_choice: SegmentChoice = "longest",
    score_truncated: bool = False,
    weights: Mapping[str, float] = OWN_REWARD,
) -> dict[str, Any]:
    """Return what a rollout function returns to `GRPOTrainer`: lists with one element per rollout, in order.

    `completion_ids`, `logprobs` and `env_mask` are of one length per rollout; `logprobs` is `None` for ids that were not
    sampled. A rollout that is left out of training (see `outcome_of`) keeps its place with reward `None` and a mask of
    zeros, so it enters neither the baseline nor the loss. So does one that has nothing of what has a weight in `weights`
    (see `weighted_reward`). A rollout without sampled ids has one masked `filler_id`.
    """
    rewards = [_training_reward(sampled.rollout, score_truncated, weights) for sampled in rollouts]
    delivered = [
        _delivered(sampled, filler_id, segment_choice, trained=reward is not None)
        for sampled, reward in zip(rollouts, rewards, strict=True)
    ]
    return {
        "prompt_ids": [segment.prompt_ids for segment in delivered],
        "completion_ids": [segment.completion_ids for segment in delivered],
        "logprobs": [segment.logprobs or [None] * len(segment.mask) for segment in delivered],
        "env_mask": [segment.mask for segment in delivered],
        "env_reward": rewards,
        "reward_parts": [
            {} if reward is None else dict(sampled.rollout.reward_parts)
            for sampled, reward in zip(rollouts, rewards, strict=True)
        ],
        "rollout_metrics": [
            rollout_metrics(sampled, segment) for sampled, segment in zip(rollouts, delivered, strict=True)
        ],
    }


def _training_reward(rollout: Rollout, score_truncated: bool, weights: Mapping[str, float]) -> float | None:
    """Return the environment's reward to learn from; `None` for a rollout that is left out."""
    reward = outcome_of(rollout, score_truncated=score_truncated).training_reward
    return None if weighted_reward(rollout, reward, weights) is None else reward


def _delivered(sampled: SampledRollout, filler_id: int, choice: SegmentChoice, *, trained: bool) -> Segment:
    if not sampled.segments:
        return filler_segment(filler_id, sampled.first_prompt_ids)
    longest = max(sampled.segments, key=lambda segment: sum(segment.mask))
    segment = sampled.segments[-1] if choice == "last" else longest
    return segment if trained else masked(segment)


def nemo_gym_reward(
    completions: list[Any],
    env_reward: list[float | None],
    rollout_metrics: list[dict[str, float]],
    environment: list[str] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """TRL's reward function: return the rewards that NeMo Gym gave, `None` for rollouts that are left out of training.

    Logs each rollout's numbers as `nemo_gym/NAME` and `nemo_gym/ENVIRONMENT/NAME`. The trainer logs their means, over the
    rollouts of all ranks.
    """
    if log_metric is not None:
        gathered = values_by_metric(rollout_metrics, environment or [""] * len(completions))
        for name, values in gathered.items():
            for value in values:
                log_metric(f"nemo_gym/{name}", value)
    return list(env_reward)


class RewardPart:
    """TRL's reward function for a part of the reward: `None` where a rollout does not have it, or is left out of training.

    TRL logs it as `rewards/NAME/mean`, over the rollouts that have it.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, reward_parts: list[dict[str, float]], **_: Any) -> list[float | None]:
        return [parts.get(self.__name__) for parts in reward_parts]


def check_weights(trainer: Any, weights: Sequence[float]) -> None:
    """Raise `ConfigError` if the trainer does not weigh the spec's reward functions, which come first, by these weights."""
    actual = trainer.reward_weights.tolist()[: len(weights)]
    if not all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(actual, weights, strict=True)):
        raise ConfigError(
            f"the trainer weighs the parts of the reward by {actual}, reward_parts by {list(weights)};"
            " set GRPOConfig(reward_weights=spec.reward_weights)"
        )
