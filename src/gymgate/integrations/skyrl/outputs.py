"""Rollouts as the output of a SkyRL generator (contract: skyrl 0.4, `GeneratorOutput`, step-wise). Imports no SkyRL.

SkyRL compares the rewards of all trajectories that an output holds of a prompt; a loss mask of zeros takes a trajectory out
of the loss, not out of that baseline. So a rollout that is not trained on has no row at all, which SkyRL accepts step-wise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from gymgate.core.errors import TokenDataError
from gymgate.integrations.training.rollouts import (
    SampledRollout,
    filled_logprobs,
    filler_segment,
    masked,
    mean_metrics,
    rollout_metrics,
)
from gymgate.integrations.training.spec import weighted_reward
from gymgate.rollouts import Segment, outcome_of


class TrajectoryId(Protocol):
    """The field used of SkyRL's `TrajectoryID`."""

    instance_id: str
    """The prompt; its trajectories are a group."""


class TrainedRow(NamedTuple):
    """One trained sequence."""

    id: Any
    """The `TrajectoryID` of its rollout."""
    segment: Segment
    reward: float
    stop_reason: str
    model_s: float = 0.0
    total_s: float = 0.0
    is_last: bool = True


def reward_of(
    sampled: SampledRollout, weights: Mapping[str, float], *, score_truncated: bool, evaluation: bool
) -> float | None:
    """Return the reward to learn from; in an evaluation the one to count, which a truncated rollout has too."""
    outcome = outcome_of(sampled.rollout, score_truncated=score_truncated)
    return weighted_reward(
        sampled.rollout, outcome.reward if evaluation else outcome.training_reward, weights
    )


def to_rows(
    rollouts: Sequence[SampledRollout],
    ids: Sequence[TrajectoryId],
    rewards: Sequence[float | None],
    *,
    filler_id: int,
    evaluation: bool = False,
) -> list[TrainedRow]:
    """Return a row for each segment of each rollout that has a reward, in order.

    Every row has its rollout's reward; SkyRL reads that of the last one. In training, the only rollout of a group of several
    that has a reward is masked, because SkyRL would take its whole reward as its advantage. A group without any reward has
    one masked row with reward 0.0, because SkyRL counts groups; nothing is compared with it. In an evaluation it has none,
    and if no rollout has a reward, the only row's reward is NaN.
    """
    sizes = Counter(id.instance_id for id in ids)
    scored = Counter(id.instance_id for id, reward in zip(ids, rewards, strict=True) if reward is not None)
    rows: list[TrainedRow] = []
    for sampled, id, reward in zip(rollouts, ids, rewards, strict=True):
        group = id.instance_id
        if reward is not None:
            alone = not evaluation and sizes[group] > 1 and scored[group] == 1
            rows += _rows_of(sampled, id, reward, filler_id, trained=not alone)
        elif not evaluation and not scored[group]:
            rows.append(TrainedRow(id, filler_segment(filler_id), 0.0, "error"))
            scored[group] = 1  # one such row for each group
    return rows or [TrainedRow(ids[0], filler_segment(filler_id), math.nan, "error")]


def _rows_of(
    sampled: SampledRollout, id: TrajectoryId, reward: float, filler_id: int, *, trained: bool
) -> list[TrainedRow]:
    segments = sampled.segments or [filler_segment(filler_id, sampled.first_prompt_ids)]
    timing, stop = sampled.rollout.timing, "length" if sampled.rollout.status == "truncated" else "stop"
    return [
        TrainedRow(
            id,
            segment if trained else masked(segment),
            reward,
            stop,
            timing.model_s,
            timing.total_s,
            number == len(segments),
        )
        for number, segment in enumerate(segments, 1)
    ]


def to_output(rows: Sequence[TrainedRow], metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `GeneratorOutput`. Raises `TokenDataError` for a sampled id without logprob."""
    return {
        "prompt_token_ids": [row.segment.prompt_ids for row in rows],
        "response_ids": [row.segment.completion_ids for row in rows],
        "rewards": [row.reward for row in rows],
        "loss_masks": [row.segment.mask for row in rows],
        "stop_reasons": [row.stop_reason for row in rows],
        "rollout_metrics": dict(metrics),
        "rollout_logprobs": [_logprobs(row.segment) for row in rows],
        "trajectory_ids": [row.id for row in rows],
        "is_last_step": [row.is_last for row in rows],
        "trajectory_generation_times": [row.total_s for row in rows],
        "trajectory_time_splits": {
            "llm": [row.model_s for row in rows],
            "env": [max(0.0, row.total_s - row.model_s) for row in rows],
        },
        "rollout_expert_indices": None,
        "rollout_sample_support": None,
        "env_metrics": None,
    }


def _logprobs(segment: Segment) -> list[float]:
    logprobs = filled_logprobs(segment)
    if logprobs is None and any(segment.mask):
        raise TokenDataError("the inference servers gave no logprobs; SkyRL needs one for each sampled id")
    return logprobs or [0.0] * len(segment.mask)


def log_entries(rollouts: Sequence[SampledRollout]) -> dict[str, float]:
    """Return means over all rollouts, as `nemo_gym/mean/NAME` and `nemo_gym/mean/ENVIRONMENT/NAME`.

    SkyRL puts several outputs together by the mean of each number that has `mean` in its name; it adds up other numbers.
    """
    metrics = [rollout_metrics(sampled) for sampled in rollouts]
    means = mean_metrics(metrics, [sampled.rollout.environment for sampled in rollouts])
    return {f"nemo_gym/mean/{name}": mean for name, mean in means.items()}
