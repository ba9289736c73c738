"""The rows that a trainer sees: sources by environment, blended by weight."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from gymgate.dataset import Row, blend
from gymgate.errors import ConfigError, DataError


class Source(NamedTuple):
    """The rows of one environment."""

    environment: str
    rows: Sequence[Row]
    weight: float
    agents: Collection[str] | None = None
    """Agents that its rows may name; `None`: not known here."""

    def named(self) -> Iterator[tuple[str, Row]]:
        """Each row with the environment it is for. `DataError` for a row whose agent the environment does not have."""
        for row in self.rows:
            if self.agents is not None:
                check_agent(row, self.environment, self.agents)
            yield self.environment, row

    def endless(self) -> Iterator[tuple[str, Row]]:
        """The rows over and over."""
        while True:
            yield from self.named()


def check_agent(row: Row, environment: str, agents: Collection[str]) -> None:
    """Raise `DataError` for a row that names an agent other than these."""
    if row.agent is None or row.agent in agents:
        return
    known = ", ".join(sorted(agents))
    raise DataError(
        f"{row.source}:{row.line}: agent_ref names {row.agent!r}, not an agent of environment {environment!r}: {known}",
        path=row.source,
        line=row.line,
    )


def blended(sources: Sequence[Source], *, limit: int | None, seed: int) -> Iterator[tuple[str, Row]]:
    """Rows drawn by weight until every source was given once, or until `limit`.

    A source that is through before the others starts over, so that the weights hold over the whole stream: trainers shuffle it.
    """
    return islice(_until_all_were_given(sources, seed), limit)


def _until_all_were_given(sources: Sequence[Source], seed: int) -> Iterator[tuple[str, Row]]:
    left = {source.environment: len(source.rows) for source in sources}
    if empty := sorted(name for name, count in left.items() if not count):
        raise ConfigError(f"no rows for environment {', '.join(map(repr, empty))}")
    for name, row in blend([(source.endless(), source.weight) for source in sources], seed=seed):
        yield name, row
        left[name] -= 1
        if max(left.values()) <= 0:
            return
