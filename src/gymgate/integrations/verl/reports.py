"""Figures of rollouts on their way from verl's agent-loop workers to its trainer, through its TransferQueue.

verl hands nothing that an agent loop measures to its training log, and of a failed session nothing at all. So each rollout leaves
its figures as the tag of a key in a partition of their own, and `NeMoGymReplayBuffer` takes them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gymgate.errors import GymgateError, from_wire
from gymgate.integrations.training.figures import Attempt, means, metrics

PARTITION = "nemo_gym"
SAMPLERS = ("NeMoGymReplayBuffer", "NeMoGymReplayBufferAsync")
"""Without one of them nobody would take the figures out."""


async def report(config: Any, attempt: Attempt, kwargs: Mapping[str, Any], *, scored: bool) -> None:
    """Leave a rollout's figures, and why it is not trained on, where the trainer's replay buffer takes them."""
    if "session_id" not in kwargs or _sampler(config) not in SAMPLERS:
        return
    import transfer_queue as tq

    tag = {
        "environment": attempt.rollout.environment,
        "figures": metrics(attempt),
        "unscored": None if scored else reason(attempt),
    }
    key = f"{kwargs['uid']}_{kwargs['session_id']}"
    await tq.async_kv_put(key=key, partition_id=PARTITION, tag=tag)


async def validates(kwargs: Mapping[str, Any]) -> bool:
    """Whether a session is one of verl's validation. verl tells agent loops only by the partition that waits for them."""
    import transfer_queue as tq

    waiting = await tq.async_kv_list(partition_id="val") or {}
    return kwargs["uid"] in waiting.get("val", {})


def reason(attempt: Attempt) -> dict[str, str]:
    """Why a rollout is not trained on, without its id: class of the error and message."""
    rollout = attempt.rollout
    if rollout.error is not None:
        return {"error": rollout.error.type, "message": f"{rollout.error.kind}: {rollout.error.message}"}
    if not attempt.segments:
        return {
            "error": "DataError",
            "message": "the policy sampled nothing (does the prompt fit the model's length?)",
        }
    if rollout.status == "truncated":
        told = "truncated: raise data.max_response_length or the entry's limits, or set its score_truncated"
        return {"error": "DataError", "message": told}
    return {"error": "DataError", "message": f"{rollout.status}, with reward {rollout.reward}"}


def _sampler(config: Any) -> str | None:
    trainer = config.get("trainer") or {}
    custom = (((trainer.get("v1") or {}).get("sampler") or {}).get("custom_sampler")) or {}
    name = custom.get("name")
    return None if name is None else str(name)


def logged(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the rollouts, as `nemo_gym/NAME` and `nemo_gym/ENVIRONMENT/NAME`."""
    figures = [tag["figures"] for tag in reports]
    environments = [str(tag["environment"]) for tag in reports]
    return {f"nemo_gym/{name}": value for name, value in means(figures, environments).items()}


def most_frequent(reports: Iterable[Mapping[str, Any]]) -> tuple[GymgateError, int] | None:
    """Why most of those that are not trained on are not, and how many these are; `None` if all are trained on."""
    reasons = Counter(
        (tag["unscored"]["error"], tag["unscored"]["message"])
        for tag in reports
        if tag["unscored"] is not None
    )
    if not reasons:
        return None
    (kind, message), count = reasons.most_common(1)[0]
    return from_wire({"error": kind, "message": message}), count
