"""The rows that a trainer sees: one source per environment, drawn by weight or one source after the other."""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.config import EnvironmentConfig, RuntimeConfig
from gymgate.core.errors import ConfigError
from gymgate.gym.catalog import Environment
from gymgate.gym.records import answer_warning, missing_answer
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import open_catalog
from gymgate.rollouts import Row, blend
from gymgate.rollouts.row import input_items, row_error

logger = logging.getLogger(__name__)

ROW = "nemo_gym_row"
"""Column of a trainer's dataset with the whole row, verbatim, as JSON."""
ENVIRONMENT = "environment"
"""Column with the environment's name; empty if the row's own `agent_ref` decides."""
CHECKED_ROWS = 1000
"""Rows of each source whose agents and answers are checked when it is opened. Other rows' agents are checked when they run."""


class WeightedSource(NamedTuple):
    """The rows of one environment, and how often they are drawn."""

    environment: str
    rows: Sequence[Row]
    weight: float | None = None
    """Relative to the other sources; `None` counts as 1."""
    agents: Collection[str] | None = None
    """Agents that the rows may name; `None`: any."""

    def row(self, position: int) -> Row:
        """Read one row. Raises `DataError` if it names an agent other than `agents`."""
        row = self.rows[position]
        if row.agent is None or self.agents is None or row.agent in self.agents:
            return row
        names = ", ".join(sorted(self.agents))
        reason = f"agent_ref is {row.agent!r}, not an agent of environment {self.environment!r}: {names}"
        raise row_error(reason, row.source, row.line)


Draw = tuple[int, int]
"""Which row comes next: the number of its source, and its position there. Nothing is read to draw it."""


def in_turn(sources: Sequence[WeightedSource]) -> Iterator[Draw]:
    """Draw every row of every source once, one source after the other."""
    return ((number, at) for number, source in enumerate(sources) for at in range(len(source.rows)))


def blended(sources: Sequence[WeightedSource], seed: int) -> Iterator[Draw]:
    """Draw by weight until every source was given once.

    A source that ends before the others starts over, so that the weights hold for the whole stream: trainers shuffle it.
    Raises `ConfigError` for a source without rows.
    """
    remaining = [len(source.rows) for source in sources]
    if empty := sorted(source.environment for source in sources if not len(source.rows)):
        raise ConfigError(f"no rows for environment {', '.join(map(repr, empty))}")
    streams = [
        (zip(repeat(number), _endless(len(source.rows))), 1.0 if source.weight is None else source.weight)
        for number, source in enumerate(sources)
    ]
    for number, position in blend(streams, seed=seed):
        yield number, position
        remaining[number] -= 1
        if max(remaining) <= 0:
            return


class Draws:
    """Which row stands at each index of a dataset: 16 bytes per row.

    If any source has a weight, rows are drawn by weight (1 where none is set) until each source was given once; otherwise
    every row of every source comes once. A positive `limit` limits the rows.
    """

    def __init__(self, sources: Sequence[WeightedSource], *, seed: int = 0, limit: int = -1) -> None:
        weighted = any(source.weight is not None for source in sources)
        draws = blended(sources, seed) if weighted else in_turn(sources)
        self._flat = array("q")  # source, position, source, position, ...
        for draw in islice(draws, limit if limit > 0 else None):
            self._flat.extend(draw)

    def __len__(self) -> int:
        return len(self._flat) // 2

    def __getitem__(self, index: int) -> Draw:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._flat[2 * index], self._flat[2 * index + 1]


def columns_of(source: WeightedSource, row: Row) -> dict[str, Any]:
    """Return the columns by which a trainer carries a row, and its environment or agent as `data_source`, for metrics."""
    return {
        "data_source": source.environment or row.agent or "nemo_gym",
        ENVIRONMENT: source.environment,
        ROW: codec.dumps(row.data).decode(),
    }


def row_in(columns: Mapping[str, Any], advice: str) -> tuple[str, dict[str, Any]]:
    """Return environment and row of a dataset's columns. Raises `ConfigError` with advice for a dataset that has none."""
    if ROW not in columns:
        raise ConfigError(f"the dataset has no column {ROW!r}; {advice}")
    return str(columns.get(ENVIRONMENT, "")), codec.loads(columns[ROW].encode())


def open_training_sources(files: Any, runtime: RuntimeConfig) -> list[WeightedSource]:
    """Open the sources that a trainer's config names: one or several files of rows that name their agent, or rows by
    environment, such as `{"mcqa": {"data": "train.jsonl", "weight": 2}, "calendar": "example"}`.

    Raises `ConfigError` for anything else, and for a source without rows.
    """
    if isinstance(files, Mapping):
        settings_of = {str(name): _settings(str(name), source) for name, source in files.items()}
        environments = open_catalog(runtime).environments_of(
            EnvironmentConfig(name=name) for name in settings_of
        )
        sources = [
            _open_source(name, environment, **settings)
            for (name, environment), settings in zip(environments.items(), settings_of.values(), strict=True)
        ]
    else:
        names = [files] if isinstance(files, str) else list(files) if isinstance(files, Iterable) else []
        sources = [WeightedSource("", open_rows(str(name), environment=None)) for name in names]
    if empty := [source.environment or source.rows for source in sources if not len(source.rows)]:
        raise ConfigError(f"no rows for {', '.join(map(str, empty))}")
    if not sources:
        raise ConfigError("give rows as training and validation data: {ENVIRONMENT: SOURCE} or JSONL files")
    return sources


def _settings(name: str, source: Any) -> dict[str, Any]:
    """Return the `weight` of an environment's rows, and their `data` if it is given. Raises `ConfigError`."""
    settings = {"data": source} if isinstance(source, str) else {} if source is None else source
    if not isinstance(settings, Mapping) or not isinstance(settings.get("data", ""), str):
        raise ConfigError(
            f"rows of environment {name!r} are a source or {{data: SOURCE, weight: NUMBER}}, not {source!r}"
        )
    if unknown := sorted(map(str, settings.keys() - {"data", "weight"})):
        raise ConfigError(f"rows of environment {name!r} have data and weight, not {', '.join(unknown)}")
    weight = settings.get("weight")
    return {**settings, "weight": None if weight is None else checked_weight(name, weight)}


def _open_source(
    name: str, environment: Environment, *, weight: float | None, data: str = "example"
) -> WeightedSource:
    opened = WeightedSource(
        name,
        open_rows(data, environment=environment),
        weight,
        {name for config in environment.configs for name in config.row_targets},
    )
    warned: set[str] = set()
    for position in range(min(CHECKED_ROWS, len(opened.rows))):
        _warn_of_answer(environment.name, opened.row(position), warned)
    return opened


def checked_weight(environment: Any, weight: Any) -> float:
    """Return the weight of an environment's rows. Raises `ConfigError` unless it is a positive number."""
    if isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight <= sys.float_info.max:
        return float(weight)
    raise ConfigError(f"weight of environment {environment!r} must be a positive number, not {weight!r}")


def prompt_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the row's conversation as roles and texts, for logs; content that is no text is named in brackets."""
    items = input_items(row["responses_create_params"])
    messages = [{"role": item.get("role") or "tool", "content": _text(item)} for item in items]
    return messages or [{"role": "user", "content": ""}]


def _text(item: Mapping[str, Any]) -> str:
    content = item.get("content", item.get("output", item.get("arguments")))
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, Mapping) else {} for part in content or []]
    return "".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in parts)


def read_rows(sources: Sequence[WeightedSource], draws: Iterator[Draw]) -> Iterator[tuple[str, Row]]:
    """Read the rows that were drawn, each with the name of its environment; warn of rows without their answer, once."""
    warned: set[str] = set()
    for number, position in draws:
        environment, row = sources[number].environment, sources[number].row(position)
        _warn_of_answer(environment, row, warned)
        yield environment, row


def _warn_of_answer(environment: str, row: Row, warned: set[str]) -> None:
    """Log a row without the answer that scoring reads, the first one of an environment."""
    field = None if environment in warned else missing_answer(environment, row)
    if field is not None:
        warned.add(environment)
        logger.warning("%s", answer_warning(environment, field, row))


def _endless(count: int) -> Iterator[int]:
    return chain.from_iterable(repeat(range(count)))
