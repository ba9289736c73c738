"""NeMo Gym rows as verl's dataset: `data.custom_cls.path=pkg://gymgate.verl data.custom_cls.name=NeMoGymDataset`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset

from gymgate import codec
from gymgate.api import load_catalog
from gymgate.catalog import Catalog
from gymgate.config import RuntimeConfig
from gymgate.dataset import open_rows
from gymgate.dataset.row import input_items
from gymgate.errors import ConfigError
from gymgate.integrations.training.rows import WeightedSource, blended, in_turn

ROW = "nemo_gym_row"
"""Column with the whole row, verbatim, as JSON."""
ENVIRONMENT = "environment"
"""Column with the environment's name; empty if the row's own `agent_ref` decides."""
CHECKED_ROWS = 1000
"""Rows of each source whose agents are checked when the dataset is made. Other rows are checked when they run."""


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
        self.sources = open_sources(plain(data_files), runtime)
        weighted = any(source.weight for source in self.sources)
        draws = blended(self.sources, int(settings.get("seed", 0))) if weighted else in_turn(self.sources)
        self._draws = array("q")  # source, position, source, position, ...: 16 bytes per row
        for draw in islice(draws, max_samples if max_samples > 0 else None):
            self._draws.extend(draw)

    def __len__(self) -> int:
        return len(self._draws) // 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one row: `raw_prompt` (the items of its input, verbatim), `index`, `data_source`, and the row itself."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        source = self.sources[self._draws[2 * index]]
        row = source.rows[self._draws[2 * index + 1]]
        return {
            "raw_prompt": input_items(row.data["responses_create_params"]),
            "index": index,
            "data_source": source.environment or row.agent or "nemo_gym",
            ENVIRONMENT: source.environment,
            ROW: codec.dumps(row.data).decode(),
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),  # verl's v0 batches must contain a tensor
        }


def plain(value: Any) -> Any:
    """Return an OmegaConf node as plain Python, anything else as it is."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def open_sources(files: Any, runtime: RuntimeConfig) -> list[WeightedSource]:
    """Open the sources that `data_files` names. Raises `ConfigError` for anything else, and for a source without rows."""
    if isinstance(files, Mapping):
        catalog = load_catalog(runtime)
        sources = [_open_source(catalog, name, source) for name, source in files.items()]
    else:
        names = [files] if isinstance(files, str) else list(files or ())
        sources = [WeightedSource("", open_rows(str(name), environment=None)) for name in names]
    if empty := [source.environment or source.rows for source in sources if not len(source.rows)]:
        raise ConfigError(f"no rows for {', '.join(map(str, empty))}")
    if not sources:
        raise ConfigError(
            "data.train_files and data.val_files must name rows: {ENVIRONMENT: SOURCE} or JSONL files"
        )
    return sources


def _open_source(catalog: Catalog, name: str, source: Any) -> WeightedSource:
    wanted = {"data": source} if isinstance(source, str) else dict(source or {})
    if unknown := sorted(wanted.keys() - {"data", "weight"}):
        raise ConfigError(f"rows of environment {name!r} have data and weight, not {', '.join(unknown)}")
    environment = catalog.find(name)
    weight = wanted.get("weight")
    opened = WeightedSource(
        environment.name,
        open_rows(wanted.get("data", "example"), environment=environment),
        None if weight is None else float(weight),
        {agent.name for config in environment.configs for agent in config.agents},
    )
    for position in range(min(CHECKED_ROWS, len(opened.rows))):
        opened.row(position)
    return opened
