"""verl's replay buffers with NeMo Gym's figures in the trainer's own log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from gymgate.errors import from_wire
from gymgate.integrations.verl.reports import PARTITION, logged, most_frequent

logger = logging.getLogger(__name__)

GIVE_UP_AFTER = 3
"""Batches' worth of groups without one rollout to train on, after which a training that only refills ends with the reason."""


class _Reporting:
    """Mixed into a replay buffer: takes rollouts' figures out of the TransferQueue with each batch."""

    def __init__(self, *args: Any, sampler_kwargs: Any = None, **kwargs: Any) -> None:
        """Arguments of the replay buffer that verl does not hand to custom ones may be given as `sampler_kwargs`."""
        self._reports: dict[str, dict[str, Any]] = {}
        self._wanted = 1
        if (refill := kwargs.get("refill_fn")) is not None:
            kwargs["refill_fn"] = self._watched(refill)
        given = {**kwargs, "sampler_kwargs": sampler_kwargs, **dict(sampler_kwargs or {})}
        super().__init__(*args, **given)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """As of the replay buffer, with the figures of all rollouts that ended since the last batch."""
        self._wanted = batch_size
        try:
            batch, metrics = super().sample(global_steps, partition_id, batch_size)  # type: ignore[misc]
        except RuntimeError as error:
            self._collect()
            if (found := most_frequent(self._reports.values())) is not None:
                raise _explained(*found, len(self._reports)) from error
            raise
        self._collect()
        if partition_id == "val":
            self._drop(self.finished_keys["val"] | self.failure_keys["val"])  # type: ignore[attr-defined]
            return batch, metrics
        reports, self._reports = [*self._reports.values()], {}
        if (found := most_frequent(reports)) is not None:
            logger.warning(
                "not trained on, most often (%d of %d rollouts): %s", found[1], len(reports), found[0]
            )
        return batch, {**metrics, **logged(reports)}

    def _collect(self) -> None:
        found: Mapping[str, dict[str, Any]] = (tq.kv_list(partition_id=PARTITION) or {}).get(PARTITION, {})
        if found:
            self._reports.update(found)
            tq.kv_clear(keys=[*found], partition_id=PARTITION)

    def _drop(self, uids: set[str]) -> None:
        self._reports = {key: tag for key, tag in self._reports.items() if key.rsplit("_", 1)[0] not in uids}

    def _nothing_scored(self) -> bool:
        return all(tag["unscored"] is not None for tag in self._reports.values())

    def _watched(self, refill: Callable[[int], Any]) -> Callable[[int], Any]:
        """A refill that gives up, with the reason, where nothing comes that could be trained on."""

        def watched(count: int) -> Any:
            self._collect()
            groups = {key.rsplit("_", 1)[0] for key in self._reports}
            if len(groups) >= GIVE_UP_AFTER * self._wanted and self._nothing_scored():
                found = most_frequent(self._reports.values())
                assert found is not None
                raise _explained(*found, len(self._reports))
            return refill(count)

        return watched


def _explained(error: Exception, count: int, number: int) -> Exception:
    told = f"{count} of the {number} rollouts since the last batch gave nothing to train on for one reason: {error}"
    return from_wire({"error": type(error).__name__, "message": told})


class NeMoGymReplayBuffer(_Reporting, ReplayBuffer):  # type: ignore[misc]
    """For `trainer.v1.trainer_mode=sync`; set as `trainer.v1.sampler.custom_sampler`."""


class NeMoGymReplayBufferAsync(_Reporting, ReplayBufferAsync):  # type: ignore[misc]
    """For `trainer.v1.trainer_mode=colocate_async` and `separate_async`."""
