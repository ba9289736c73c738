"""Where rollouts go on when a training does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from transformers import TrainerCallback

if TYPE_CHECKING:
    from gymgate.integrations.trl.async_worker import RolloutWorker

logger = logging.getLogger(__name__)

FILE = "gymgate_rollouts.json"


class PositionCallback(TrainerCallback):
    """Writes the worker's position beside each checkpoint, and reads it back where training resumes.

    Rows whose samples were waiting when the checkpoint was made are rolled out again.
    """

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Comes before TRL starts the worker."""
        file = self._file(args, state)
        if state.global_step and file.exists():
            self.worker.position = int(orjson.loads(file.read_bytes())["position"])
        elif state.global_step:
            logger.warning("no %s: rollouts start with the first row again", file)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After each checkpoint."""
        if state.is_world_process_zero:
            self._file(args, state).write_bytes(orjson.dumps({"position": self.worker.next_position}))

    @staticmethod
    def _file(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE
