"""The position in the data of an asynchronous training, kept in its checkpoints."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from gymgate.core import codec

if TYPE_CHECKING:
    from gymgate.integrations.trl.async_worker import RolloutWorker

logger = logging.getLogger(__name__)

FILE = "gymgate_rollouts.json"


class TrainedGroups(set[int]):
    """Stands for TRL's set of the groups that it trained on, and counts their samples."""

    def __init__(self, groups: Iterable[int] = ()) -> None:
        super().__init__(groups)
        self.samples: Counter[int] = Counter()

    def update(self, *samples: Iterable[int]) -> None:
        """Take the group of each sample of a batch, as TRL's collator gives them."""
        for groups in map(list, samples):
            super().update(groups)
            self.samples.update(groups)


class Position:
    """Finds the first group that is not settled. A group settles when it is trained on, dropped as stale, or empty."""

    def __init__(self) -> None:
        self.first = 0
        self._queued: deque[tuple[int, int]] = deque()
        self._settled: set[int] = set()

    def update(self, delivered: Iterable[tuple[int, int]], trained: Mapping[int, int]) -> None:
        """Take further groups with their samples' number, in the order in which the trainer reads them, and the number of
        samples of each group that it trained on.

        The trainer reads in order. So every group before one that it trained on is settled, and that one itself once it
        has trained on all of its samples.
        """
        self._queued.extend(delivered)
        read = 0
        for count, (group, samples) in enumerate(self._queued, 1):
            if group in trained:
                read = count if trained[group] >= samples else count - 1
        self._settled.update(self._queued.popleft()[0] for _ in range(read))
        while self.first in self._settled:
            self._settled.remove(self.first)
            self.first += 1


class PositionCallback(TrainerCallback):
    """Writes position and version of the weights beside each checkpoint, and restores both.

    Rows whose samples were not trained on before the checkpoint are run again.
    """

    def __init__(self, worker: RolloutWorker, trainer: Any) -> None:
        self.worker = worker
        self.trainer = trainer
        self._trained = trainer._trained_groups = TrainedGroups(trainer._trained_groups)
        self._position = Position()
        self._saved = self._next = worker.position

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore; runs before TRL sends weights and starts the worker."""
        file = self._file(args, state)
        if state.global_step and file.exists():
            saved = codec.loads(file.read_bytes())
            self.worker.position = int(saved["position"])
            self.trainer.model_version = int(saved.get("model_version", 0))
            self.worker.update_model_version(self.trainer.model_version)
            self.trainer._groups_before_resume = self.worker.position  # num_train_epochs counts from here
        elif state.global_step:
            logger.warning("no %s: rollouts start with the first row again", file)
        self._position = Position()
        self._saved = self._next = self.worker.position

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the groups that were trained on.

        TRL marks a group when it is collated, and accelerate collates one batch ahead. So the position after a step
        is certain only at the end of the next one.
        """
        if state.is_world_process_zero:
            self._position.update(self.worker.newly_delivered(), self._trained.samples)
            self._saved, self._next = self._next, self.worker.position + self._position.first

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the file; runs after each checkpoint."""
        if state.is_world_process_zero:
            saved = {"position": self._saved, "model_version": self.trainer.model_version}
            self._file(args, state).write_bytes(codec.dumps(saved))

    @staticmethod
    def _file(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
