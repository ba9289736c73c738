"""NeMo Gym rows as verl's dataset: `data.custom_cls.path=pkg://gymgate.verl data.custom_cls.name=NeMoGymDataset`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from gymgate.core.config import RuntimeConfig
from gymgate.integrations.training.sources import Draws, columns_of, open_training_sources
from gymgate.rollouts.row import input_items


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
        self._draws = Draws(self.sources, seed=int(settings.get("seed", 0)), limit=max_samples)

    def __len__(self) -> int:
        return len(self._draws)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row: `raw_prompt` (the items of its input, verbatim), `index`, `data_source`, and the row itself."""
        number, position = self._draws[index]
        source = self.sources[number]
        row = source.rows[position]
        return {
            "raw_prompt": input_items(row.data["responses_create_params"]),
            "index": index,
            **columns_of(source, row),
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),  # verl's v0 batches must contain a tensor
        }


def plain(value: Any) -> Any:
    """Return an OmegaConf node as plain Python, anything else as it is."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
