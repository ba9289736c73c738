"""NeMo Gym rows as verl's dataset: `data.custom_cls.path=pkg://gymgate.verl data.custom_cls.name=NeMoGymDataset`."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import orjson
import torch
from torch.utils.data import Dataset

from gymgate.api import load_catalog
from gymgate.catalog import Catalog
from gymgate.config import RuntimeConfig
from gymgate.dataset import Row, open_rows
from gymgate.errors import ConfigError
from gymgate.integrations.training.sources import Source, blended, check_agent

ROW = "nemo_gym_row"
"""Column with the whole row, verbatim, as JSON."""
ENVIRONMENT = "environment"
"""Column with the environment's name; empty where the row's own `agent_ref` says where it goes."""
CHECKED_ROWS = 1000
"""First rows of each environment's source whose agents are checked when the dataset is made; others fail when they are run."""


class Part(NamedTuple):
    """The rows of one source."""

    environment: str
    rows: Sequence[Row]
    weight: float | None


class NeMoGymDataset(Dataset):  # type: ignore[misc]
    """Rows by byte offset, read when asked for.

    `data_files` (verl's `data.train_files` and `data.val_files`) is a mapping from environments to their rows, or a file of rows
    (or several) that name their agent:

        data.train_files={workplace_assistant:{data:train.jsonl,weight:2},mcqa:{data:example}}
        data.val_files={workplace_assistant:validation.jsonl}
        data.train_files=blended.jsonl

    Rows are named as for `gymgate.open_rows`. With a weight anywhere, sources are drawn by weight (1 where none is given) until
    each was given once; without, every row of every source comes once. `+data.nemo_gym.seed` decides the draw and
    `+data.nemo_gym.runtime` the nemo-gym release whose packaged data is meant. `max_samples` bounds the rows, if positive.
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
        self.parts = open_parts(plain(data_files), runtime)
        self._where = _places(self.parts, int(settings.get("seed", 0)), max_samples)

    def __len__(self) -> int:
        return len(self._where) // 2

    def __getitem__(self, position: int) -> dict[str, Any]:
        """One row: `raw_prompt` (the items of its input, verbatim), `index`, `data_source`, and the row itself."""
        if not 0 <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        part = self.parts[self._where[2 * position]]
        row = part.rows[self._where[2 * position + 1]]
        return {
            "raw_prompt": prompt_items(row.data),
            "index": position,
            "data_source": part.environment or row.agent or "nemo_gym",
            ENVIRONMENT: part.environment,
            ROW: orjson.dumps(row.data).decode(),
            "dummy_tensor": torch.tensor([0], dtype=torch.uint8),  # verl's v0 batches must hold a tensor
        }


def plain(value: Any) -> Any:
    """An OmegaConf node as plain Python; anything else as it is."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def prompt_items(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The items of a row's input: messages, and whatever else the row has (function calls, their outputs, reasoning)."""
    source = row["responses_create_params"]["input"]
    return [{"role": "user", "content": source}] if isinstance(source, str) else list(source)


def open_parts(files: Any, runtime: RuntimeConfig) -> list[Part]:
    """The sources that `data_files` names. `ConfigError` for what it cannot be."""
    if isinstance(files, Mapping):
        catalog = load_catalog(runtime)
        parts = [_part(catalog, name, source) for name, source in files.items()]
    else:
        names = [files] if isinstance(files, str) else list(files or ())
        parts = [Part("", open_rows(str(name), environment=None), None) for name in names]
    if empty := [part.environment or part.rows for part in parts if not len(part.rows)]:
        raise ConfigError(f"no rows for {', '.join(map(str, empty))}")
    if not parts:
        raise ConfigError(
            "data.train_files and data.val_files must name rows: {ENVIRONMENT: SOURCE} or JSONL files"
        )
    return parts


def _part(catalog: Catalog, name: str, source: Any) -> Part:
    wanted = {"data": source} if isinstance(source, str) else dict(source or {})
    if unknown := sorted(wanted.keys() - {"data", "weight"}):
        raise ConfigError(f"rows of environment {name!r} have data and weight, not {', '.join(unknown)}")
    environment = catalog.find(name)
    weight = wanted.get("weight")
    rows = open_rows(wanted.get("data", "example"), environment=environment)
    agents = {agent.name for config in environment.configs for agent in config.agents}
    for row in islice(rows, CHECKED_ROWS):
        check_agent(row, environment.name, agents)
    return Part(environment.name, rows, None if weight is None else float(weight))


def _places(parts: Sequence[Part], seed: int, limit: int) -> array[int]:
    """Part and position of each row, one after the other: 16 bytes a row."""
    stream = _drawn(parts, seed) if any(part.weight for part in parts) else _in_turn(parts)
    places = array("q")
    for part, position in islice(stream, limit if limit > 0 else None):
        places.extend((part, position))
    return places


def _in_turn(parts: Sequence[Part]) -> Iterator[tuple[int, int]]:
    return ((number, position) for number, part in enumerate(parts) for position in range(len(part.rows)))


def _drawn(parts: Sequence[Part], seed: int) -> Iterator[tuple[int, int]]:
    """Positions stand for rows, so that nothing is read."""
    sources = [
        Source(
            str(number),
            cast(Sequence[Row], range(len(part.rows))),
            1.0 if part.weight is None else part.weight,
        )
        for number, part in enumerate(parts)
    ]
    return ((int(name), cast(int, position)) for name, position in blended(sources, limit=None, seed=seed))
