"""A curriculum over a TRL trainer's batches, kept in its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gymgate.core import codec
from gymgate.core.files import replacing
from gymgate.integrations.training.curriculum import Curriculum, CurriculumConfig
from gymgate.integrations.training.sources import WeightedSource
from gymgate.rollouts.row import row_key

logger = logging.getLogger(__name__)

FILE = "gymgate_curriculum.json"

Row = tuple[str, dict[str, Any]]


class BatchCurriculum(TrainerCallback):
    """Puts rows that a curriculum draws into the places of a batch.

    A place is a position in the training dataset: it decides the environment, so the weights of a blend hold. TRL's
    sampler repeats a place for each rollout of a group, perhaps on several ranks. Every rank is told the places and
    rewards of all, so all ranks draw and learn the same.
    """

    def __init__(
        self, config: CurriculumConfig, sources: Sequence[WeightedSource], seed: int, trainer: Any
    ) -> None:
        self.sources = {source.environment: source for source in sources}
        keys = {name: [row_key(row.data) for row in source.rows] for name, source in self.sources.items()}
        self.curriculum = Curriculum(config, keys, seed=seed)
        self._drawn: dict[int, tuple[str, int]] = {}
        trainer.add_callback(self)
        if step := trainer.state.global_step:
            self._restore(self._file(trainer.args, step))

    def draw(self, places: Iterable[tuple[int, str]]) -> None:
        """Draw a row for each place of the batch, given with its environment."""
        wanted = dict(sorted(places))
        drawn = self.curriculum.draw(list(wanted.values()))
        self._drawn = dict(zip(wanted, zip(wanted.values(), drawn, strict=True), strict=True))

    def row(self, place: int) -> Row:
        """Return environment and row of a place. Raises `DataError` if the row cannot be used."""
        environment, position = self._drawn[place]
        return environment, dict(self.sources[environment].row(position).data)

    def update(self, rewards: Iterable[tuple[int, float | None]]) -> dict[str, float]:
        """Learn from the batch's rewards, given with their places, and return what is logged."""
        return self.curriculum.learn((place, self._drawn[place], reward) for place, reward in rewards)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the state beside a checkpoint; runs after each."""
        if state.is_world_process_zero:
            with replacing(self._file(args, state.global_step)) as file:
                file.write(codec.dumps(self.curriculum.state()))

    def _restore(self, file: Path) -> None:
        if file.exists():
            state: Mapping[str, Any] = codec.loads_own(file.read_bytes())
            self.curriculum.restore(state)
        else:
            logger.warning("no %s: the curriculum starts with nothing known", file)

    @staticmethod
    def _file(args: Any, step: int) -> Path:
        return Path(args.output_dir) / f"checkpoint-{step}" / FILE
