"""The rows that a trainer sees: one source per environment, drawn by weight or one source after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from gymgate.dataset import Row, blend
from gymgate.errors import ConfigError, DataError


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
        known = ", ".join(sorted(self.agents))
        raise DataError(
            f"{row.source}:{row.line}: agent_ref is {row.agent!r},"
            f" not an agent of environment {self.environment!r}: {known}",
            path=row.source,
            line=row.line,
        )


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


def read_rows(sources: Sequence[WeightedSource], draws: Iterator[Draw]) -> Iterator[tuple[str, Row]]:
    """Read the rows that were drawn, each with the name of its environment."""
    return ((sources[number].environment, sources[number].row(position)) for number, position in draws)


def _endless(count: int) -> Iterator[int]:
    return chain.from_iterable(repeat(range(count)))
