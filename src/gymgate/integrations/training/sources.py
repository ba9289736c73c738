"""The rows that a trainer sees: sources by environment, blended by weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from gymgate.dataset import Row, blend
from gymgate.errors import ConfigError


class Source(NamedTuple):
    """The rows of one environment."""

    environment: str
    rows: Sequence[Row]
    weight: float

    def named(self) -> Iterator[tuple[str, Row]]:
        """Each row with the environment it is for."""
        return ((self.environment, row) for row in self.rows)

    def endless(self) -> Iterator[tuple[str, Row]]:
        """The rows over and over."""
        while True:
            yield from self.named()


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
