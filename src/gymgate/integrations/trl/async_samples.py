"""A group of rollouts as the samples that `AsyncGRPOTrainer` trains on."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from gymgate.errors import TokenDataError
from gymgate.integrations.training.figures import Attempt, gathered, metrics
from gymgate.rollout import Segment, outcome_of

EPSILON = 1e-8
Figures = dict[str, tuple[float, float]]
"""Sum and count by name: a rate to TRL."""


def to_samples(
    attempts: Sequence[Attempt],
    *,
    group_id: int,
    version: int,
    prompt: list[dict[str, str]],
    decode: Callable[[list[int]], str],
    score_truncated: bool = False,
) -> list[Any]:
    """One `RolloutSample` for each segment of each scored rollout; none of a group in which nothing was scored.

    The advantage is that of the rollout within its group, by the mean and the deviation of the scored ones. `version` holds
    where the engine gave none. Raises `TokenDataError` where a sampled id has no logprob.
    """
    scores = [outcome_of(attempt.rollout, score_truncated=score_truncated).taught for attempt in attempts]
    known = [value for value in scores if value is not None]
    spread = pstdev(known) if known else 0.0
    samples = []
    for attempt, value in zip(attempts, scores, strict=True):
        if value is None:
            continue
        advantage = (value - fmean(known)) / (spread + EPSILON)
        figures = {"reward": value, "reward_std": spread, "rewards/nemo_gym_reward": value}
        oldest = min(
            (segment.policy_version[0] for segment in attempt.segments if segment.policy_version),
            default=version,
        )
        for segment in attempt.segments:
            completion = [{"role": "assistant", "content": decode(segment.completion_ids)}]
            samples.append(
                _sample(
                    segment,
                    prompt=prompt,
                    completion=completion,
                    advantage=advantage,
                    model_version=oldest,
                    group_id=group_id,
                    metrics=dict(figures),
                )
            )
    return samples


def sample_class() -> Any:
    """TRL's `RolloutSample`; importing it takes seconds."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # said in the trainer's process
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    return RolloutSample


def _sample(segment: Segment, **fields: Any) -> Any:
    import numpy

    known, before = segment.logprobs or [None] * len(segment.mask), len(segment.prompt_ids)
    if any(on and value is None for on, value in zip(segment.mask, known, strict=True)):
        raise TokenDataError("the engine gave no logprob for a sampled id; AsyncGRPOTrainer needs them all")
    values = [
        value if on and value is not None else 0.0 for on, value in zip(segment.mask, known, strict=True)
    ]
    return sample_class()(
        input_ids=numpy.asarray([*segment.prompt_ids, *segment.completion_ids], dtype=numpy.int64),
        completion_mask=numpy.asarray([0] * before + segment.mask, dtype=numpy.int64),
        old_log_probs=numpy.asarray([0.0] * before + values, dtype=numpy.float32),
        **fields,
    )


def group_figures(attempts: Sequence[Attempt], environment: str) -> Figures:
    """For TRL's metrics queue, as `nemo_gym/NAME` and `nemo_gym/ENVIRONMENT/NAME`."""
    finite = [
        {name: value for name, value in metrics(attempt).items() if math.isfinite(value)}
        for attempt in attempts
    ]
    found = gathered(finite, [environment] * len(finite))
    return {f"nemo_gym/{name}": (sum(values), float(len(values))) for name, values in found.items()}
