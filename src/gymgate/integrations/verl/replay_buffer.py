"""verl's replay buffers with NeMo Gym's metrics in the trainer's own log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from gymgate.core.errors import GymgateError, from_wire
from gymgate.integrations.training.rollouts import MAX_FAILED_BATCHES, MIN_FAILED_GROUPS
from gymgate.integrations.verl.reports import PARTITION, log_entries, most_frequent

logger = logging.getLogger(__name__)


class _Reporting:
    """Mixed into a replay buffer: collects the reports of rollouts with each batch."""

    def __init__(self, *args: Any, sampler_kwargs: Any = None, **kwargs: Any) -> None:
        """`sampler_kwargs` may have arguments of the replay buffer, because verl does not pass all to a custom one."""
        self._reports: dict[str, dict[str, Any]] = {}
        self._batch_size = 1
        if (refill := kwargs.get("refill_fn")) is not None:
            kwargs["refill_fn"] = self._guarded(refill)
        super().__init__(*args, **{**kwargs, "sampler_kwargs": sampler_kwargs, **dict(sampler_kwargs or {})})

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Return what the replay buffer returns, with metrics of all rollouts that ended since the last batch."""
        self._batch_size = batch_size
        try:
            batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        except RuntimeError as error:
            self._collect()
            if (explained := self._explained()) is not None:
                raise explained from error
            raise
        self._collect()
        if partition_id == "val":
            ended = self.finished_keys["val"] | self.failure_keys["val"]  # type: ignore[attr-defined]
            self._reports = {key: tag for key, tag in self._reports.items() if _group(key) not in ended}
            return batch, metrics
        reports, self._reports = [*self._reports.values()], {}
        if (most_common := most_frequent(reports)) is not None:
            reason, count = most_common
            logger.warning("%d of %d rollouts are not trained on: %s", count, len(reports), reason)
        return batch, {**metrics, **log_entries(reports)}

    def _collect(self) -> None:
        reports: Mapping[str, dict[str, Any]] = (tq.kv_list(partition_id=PARTITION) or {}).get(PARTITION, {})
        if reports:
            self._reports.update(reports)
            tq.kv_clear(keys=[*reports], partition_id=PARTITION)

    def _guarded(self, refill: Callable[[int], Any]) -> Callable[[int], Any]:
        """Return a refill that raises once `MAX_FAILED_BATCHES` batches of groups gave nothing to train on."""

        def guarded(count: int) -> Any:
            self._collect()
            groups = len({_group(key) for key in self._reports})
            enough = groups >= max(MAX_FAILED_BATCHES * self._batch_size, MIN_FAILED_GROUPS)
            if enough and all(tag["untrained"] is not None for tag in self._reports.values()):
                explained = self._explained()
                assert explained is not None
                raise explained
            return refill(count)

        return guarded

    def _explained(self) -> GymgateError | None:
        """Return the most frequent reason not to train on a rollout; `None` if there is none."""
        if (most_common := most_frequent(self._reports.values())) is None:
            return None
        reason, count = most_common
        total = f"{count} of the {len(self._reports)} rollouts since the last batch"
        message = f"{total} gave nothing to train on for one reason: {reason}"
        return from_wire({"error": type(reason).__name__, "message": message})


def _group(key: str) -> str:
    return key.rsplit("_", 1)[0]


class NeMoGymReplayBuffer(_Reporting, ReplayBuffer):  # type: ignore[misc]
    """For `trainer.v1.trainer_mode=sync`; set as `trainer.v1.sampler.custom_sampler`."""


class NeMoGymReplayBufferAsync(_Reporting, ReplayBufferAsync):  # type: ignore[misc]
    """For `trainer.v1.trainer_mode=colocate_async` and `separate_async`."""
