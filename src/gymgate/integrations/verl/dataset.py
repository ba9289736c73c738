"""NeMo Gym rows as verl's dataset: `data.custom_cls.path=pkg://gymgate.verl data.custom_cls.name=NeMoGymDataset`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import ConfigError
from gymgate.integrations.training.curriculum import Curriculum, CurriculumConfig
from gymgate.integrations.training.sources import Draws, columns_of, open_training_sources
from gymgate.integrations.verl.reports import AT
from gymgate.rollouts.row import input_items, row_key


class NeMoGymDataset(Dataset):  # type: ignore[misc]
    """Rows by byte offset, read when they are needed.

    `data_files` (verl's `data.train_files` and `data.val_files`) maps environments to their rows, or names one or several
    files of rows that name their agent:

        data.train_files={workplace_assistant:{data:train.jsonl,weight:2},mcqa:{data:example}}
        data.val_files={workplace_assistant:validation.jsonl}
        data.train_files=blended.jsonl

    Rows are named as for `gymgate.open_rows`. If any source has a weight, rows are drawn by weight (1 where none is given)
    until each source was given once; otherwise every row of every source comes once. `+data.nemo_gym.seed` decides the
    draw, `+data.nemo_gym.runtime` the nemo-gym release whose packaged data is read. A positive `max_samples` limits the rows.

    `+data.nemo_gym.curriculum={target:0.5}` (see `CurriculumConfig`) lets pass rates decide which row of a source comes; its
    weight still holds. The rollouts that `NeMoGymReplayBuffer` sees measure the rates. The dataset's state, which is in each
    checkpoint of verl's data loader, has them. Only the training's dataset has a curriculum: the one of `data.train_files`.
    """

    def __init__(
        self,
        data_files: Any,
        tokenizer: Any = None,
        config: Any = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        settings = plain((config or {}).get("nemo_gym")) or {}
        runtime = RuntimeConfig.model_validate(settings.get("runtime") or {})
        self.sources = open_training_sources(plain(data_files), runtime)
        seed = int(settings.get("seed", 0))
        self._draws = Draws(self.sources, seed=seed, limit=max_samples)
        self.curriculum: Curriculum | None = None
        if (chosen := settings.get("curriculum")) is not None and _is_training(data_files, config):
            keys = [[row_key(row.data) for row in source.rows] for source in self.sources]
            self.curriculum = Curriculum(
                CurriculumConfig.model_validate(chosen),
                {self._name(number): each for number, each in enumerate(keys)},
                seed=seed,
            )
            _learning.add(self)

    def __len__(self) -> int:
        return len(self._draws)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row: `raw_prompt` (the items of its input, verbatim), `index`, `data_source`, and the row itself."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several rows, which a curriculum draws together."""
        draws = [self._draws[index] for index in indices]
        numbers = [number for number, _ in draws]
        if self.curriculum is None:
            positions = [position for _, position in draws]
        elif get_worker_info() is not None:
            raise ConfigError(
                "a curriculum needs data.dataloader_num_workers=0: other processes learn nothing"
            )
        else:
            positions = self.curriculum.draw([self._name(number) for number in numbers])
        return [self._item(*place) for place in zip(indices, numbers, positions, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return what verl's checkpoints keep: the state of the curriculum."""
        return {} if self.curriculum is None else {"curriculum": self.curriculum.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of a checkpoint."""
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.restore(state["curriculum"])

    def learn(self, rewards: Iterable[tuple[str, str, float | None]]) -> dict[str, float]:
        """Update the curriculum by a batch: group, place (the column `AT`) and reward of each rollout. Return its metrics."""
        assert self.curriculum is not None

        def placed() -> Iterator[tuple[str, tuple[str, int], float | None]]:
            for group, at, reward in rewards:
                number, position = map(int, at.split(":"))
                yield group, (self._name(number), position), reward

        return self.curriculum.learn(placed())

    def _name(self, number: int) -> str:
        """Return the curriculum's name of a source: its environment, or the number of a file whose rows name their agents."""
        return self.sources[number].environment or str(number)

    def _item(self, index: int, number: int, position: int) -> dict[str, Any]:
        source = self.sources[number]
        row = source.rows[position]
        return {
            "raw_prompt": input_items(row.data["responses_create_params"]),
            "index": index,
            **columns_of(source, row),
            **({} if self.curriculum is None else {AT: f"{number}:{position}"}),
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),  # verl's v0 batches must contain a tensor
        }


_learning: weakref.WeakSet[NeMoGymDataset] = weakref.WeakSet()
"""Datasets of this process that have a curriculum: verl tells a dataset nothing, its replay buffer sees the rollouts."""


def learn(rewards: Sequence[tuple[str, str, float | None]]) -> dict[str, float]:
    """Teach the curriculum of this process's training, if it has one, and return its metrics."""
    learned: dict[str, float] = {}
    for dataset in _learning:
        learned |= dataset.learn(rewards)
    return learned


def _is_training(files: Any, config: Any) -> bool:
    """Whether a dataset of these files is the training's. Raises `ConfigError` if validation has the same ones."""
    training, validation = (plain(config.get(name)) for name in ("train_files", "val_files"))
    if training == validation:
        raise ConfigError("a curriculum needs other data.val_files than data.train_files")
    return bool(plain(files) == training)


def plain(value: Any) -> Any:
    """Return an OmegaConf node as plain Python, anything else as it is."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
