"""Where rollouts go on when a training does."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from transformers import TrainerCallback

if TYPE_CHECKING:
    from gymgate.integrations.trl.async_worker import RolloutWorker

logger = logging.getLogger(__name__)

FILE = "gymgate_rollouts.json"


class Position:
    """The first group that is not settled. Settled are groups that were trained on, dropped as stale, or gave no sample."""

    def __init__(self) -> None:
        self.first = 0
        self._waiting: deque[int] = deque()
        self._settled: set[int] = set()

    def update(self, delivered: Iterable[int], trained: Container[int]) -> None:
        """`delivered` are further groups in the order in which the trainer reads them, `trained` all that it trained on.

        The trainer reads in order. So a group that came before one it trained on is settled, whatever became of it.
        """
        self._waiting.extend(delivered)
        reached = max((place for place, group in enumerate(self._waiting, 1) if group in trained), default=0)
        self._settled.update(self._waiting.popleft() for _ in range(reached))
        while self.first in self._settled:
            self._settled.remove(self.first)
            self.first += 1


class PositionCallback(TrainerCallback):
    """Writes the position in the data and the version of the weights beside each checkpoint; restores both.

    Rows whose samples were not trained on when the checkpoint was made are rolled out again.
    """

    def __init__(self, worker: RolloutWorker, trainer: Any) -> None:
        self.worker = worker
        self.trainer = trainer
        self._position = Position()
        self._saved = self._next = worker.position

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Runs before TRL sends weights and starts the worker."""
        file = self._file(args, state)
        if state.global_step and file.exists():
            kept = orjson.loads(file.read_bytes())
            self.worker.position = int(kept["position"])
            self.trainer.model_version = int(kept.get("model_version", 0))
            self.worker.update_model_version(self.trainer.model_version)
            self.trainer._groups_before_resume = self.worker.position  # what num_train_epochs counts from
        elif state.global_step:
            logger.warning("no %s: rollouts start with the first row again", file)
        self._position = Position()
        self._saved = self._next = self.worker.position

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count what was trained on up to here.

        TRL marks groups when it collates them, and accelerate collates one batch ahead. So the position of one step is
        certain at the end of the next one.
        """
        if state.is_world_process_zero:
            self._position.update(self.worker.newly_delivered(), self.trainer._trained_groups)
            self._saved, self._next = self._next, self.worker.position + self._position.first

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Runs after each checkpoint."""
        if state.is_world_process_zero:
            kept = {"position": self._saved, "model_version": self.trainer.model_version}
            self._file(args, state).write_bytes(orjson.dumps(kept))

    @staticmethod
    def _file(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
