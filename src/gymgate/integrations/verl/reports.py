"""Metrics of rollouts on their way from verl's agent-loop workers to its trainer, through its TransferQueue.

verl logs no numbers of agent loops, and nothing about a failed session. So each rollout leaves a report, which is the tag
of a key in a partition of its own, and `NeMoGymReplayBuffer` collects the reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gymgate.core.errors import GymgateError, from_wire
from gymgate.integrations.training.rollouts import SampledRollout, mean_metrics, rollout_metrics

PARTITION = "nemo_gym"
SAMPLERS = ("NeMoGymReplayBuffer", "NeMoGymReplayBufferAsync")
"""Only these collect the reports."""


async def report(config: Any, sampled: SampledRollout, kwargs: Mapping[str, Any], *, trained: bool) -> None:
    """Leave a rollout's metrics, and the reason if it is not trained on, for the trainer's replay buffer."""
    trainer = config.get("trainer") or {}
    sampler = ((trainer.get("v1") or {}).get("sampler") or {}).get("custom_sampler") or {}
    if "session_id" not in kwargs or sampler.get("name") not in SAMPLERS:
        return
    import transfer_queue as tq

    tag = {
        "environment": sampled.rollout.environment,
        "metrics": rollout_metrics(sampled),
        "untrained": None if trained else why_untrained(sampled),
    }
    key = f"{kwargs['uid']}_{kwargs['session_id']}"
    await tq.async_kv_put(key=key, partition_id=PARTITION, tag=tag)


async def is_validation(kwargs: Mapping[str, Any]) -> bool:
    """Return whether a session belongs to a validation. verl shows it only by the partition that waits for the session."""
    import transfer_queue as tq

    waiting = await tq.async_kv_list(partition_id="val") or {}
    return kwargs["uid"] in waiting.get("val", {})


def why_untrained(sampled: SampledRollout) -> dict[str, str]:
    """Return the error, by class name and message, that explains why a rollout is not trained on."""
    rollout, error = sampled.rollout, "DataError"
    if rollout.error is not None:
        error, message = rollout.error.type, f"{rollout.error.kind}: {rollout.error.message}"
    elif not sampled.segments:
        message = "the policy sampled nothing (does the prompt fit the model's length?)"
    elif rollout.status == "truncated":
        message = (
            "truncated: raise data.max_response_length or the entry's limits, or set its score_truncated"
        )
    elif rollout.status == "completed" and rollout.reward is not None:
        message = (
            f"reward_parts weighs nothing that it has; its parts: {', '.join(rollout.reward_parts) or 'none'}"
        )
    else:
        message = f"{rollout.status}, with reward {rollout.reward}"
    return {"error": error, "message": message}


def log_entries(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means over the rollouts, as `nemo_gym/NAME` and `nemo_gym/ENVIRONMENT/NAME`."""
    metrics = [tag["metrics"] for tag in reports]
    means = mean_metrics(metrics, [str(tag["environment"]) for tag in reports])
    return {f"nemo_gym/{name}": value for name, value in means.items()}


def most_frequent(reports: Iterable[Mapping[str, Any]]) -> tuple[GymgateError, int] | None:
    """Return the most frequent reason not to train on a rollout, with its count; `None` if all are trained on."""
    untrained = [tag["untrained"] for tag in reports if tag["untrained"] is not None]
    counts = Counter((reason["error"], reason["message"]) for reason in untrained)
    if not counts:
        return None
    [((error, message), count)] = counts.most_common(1)
    return from_wire({"error": error, "message": message}), count
