"""NeMo Gym rows as a dataset for SkyRL's data loader. Imports no SkyRL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymgate.core.config import RuntimeConfig
from gymgate.integrations.training.sources import Draws, columns_of, open_training_sources, prompt_messages


class NeMoGymDataset:
    """Rows by byte offset, read when they are needed, in place of SkyRL's `PromptDataset`.

    `files` (SkyRL's `data.train_data` and `data.val_data`) maps environments to their rows, or names one or several files of
    rows that name their agent:

        'data.train_data={workplace_assistant: {data: train.jsonl, weight: 2}, mcqa: example}'
        data.train_data=[blended.jsonl]

    Rows are named as for `gymgate.open_rows`, and drawn as `Draws` says; `seed` decides the draw. `runtime` is the nemo-gym
    release whose packaged data is read. SkyRL's metrics of an evaluation are by environment, or by the rows' agents. Raises
    `ConfigError` without rows.
    """

    def __init__(self, files: Any, *, seed: int = 0, runtime: RuntimeConfig | None = None) -> None:
        self.sources = open_training_sources(files, runtime or RuntimeConfig())
        self._draws = Draws(self.sources, seed=seed)

    def __len__(self) -> int:
        return len(self._draws)

    def __getitem__(self, index: int) -> tuple[list[dict[str, Any]], str, dict[str, Any], str]:
        """Return a row's conversation, which SkyRL shows in its logs, its environment, its columns and its id."""
        number, position = self._draws[index]
        source = self.sources[number]
        row = source.rows[position]
        columns = columns_of(source, row)
        return prompt_messages(row.data), columns["data_source"], columns, str(index)

    def collate_fn(self, items: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the items of a batch under the names that SkyRL gives them."""
        return [dict(zip(("prompt", "env_class", "env_extras", "uid"), item, strict=True)) for item in items]
