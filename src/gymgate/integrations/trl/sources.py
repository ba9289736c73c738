"""The rows a trainer sees: sources by environment, blended by weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from gymgate.catalog import Catalog
from gymgate.config import RuntimeConfig
from gymgate.dataset import Row, blend, open_rows
from gymgate.errors import ConfigError
from gymgate.runtime import ensure_runtime


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


def weights_of(environments: str | Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    """Environment names with their weights; 1 for each where none are given."""
    if isinstance(environments, Mapping):
        weights = {name: float(weight) for name, weight in environments.items()}
    else:
        weights = dict.fromkeys([environments] if isinstance(environments, str) else environments, 1.0)
    if not weights:
        raise ConfigError("NeMoGymSpec needs at least one environment")
    return weights


def find_sources(
    weights: Mapping[str, float], data: str | Mapping[str, str], runtime: RuntimeConfig
) -> list[Source]:
    """The rows of each environment; `data` names one source for all, or one for each. `ConfigError` where there are none."""
    installed = ensure_runtime(runtime)
    catalog = Catalog(installed.site, installed.version)
    sources = []
    for name, weight in weights.items():
        environment, named = catalog.find(name), data if isinstance(data, str) else data.get(name)
        if named is None:
            raise ConfigError(
                f"data names no rows for environment {name!r}; it has {', '.join(sorted(data))}"
            )
        sources.append(Source(environment.name, open_rows(named, environment=environment), weight))
    return sources


def blended(sources: Sequence[Source], *, limit: int | None, seed: int) -> Iterator[tuple[str, Row]]:
    """Rows drawn by weight until every source was given once, or until `limit`.

    A source that is through before the others starts over, so that the weights hold over the whole stream: trainers shuffle it.
    """
    return islice(_until_all_were_given(sources, seed), limit)


def in_turn(sources: Sequence[Source]) -> Iterator[tuple[str, Row]]:
    """Every row of every source once."""
    return chain.from_iterable(source.named() for source in sources)


def _until_all_were_given(sources: Sequence[Source], seed: int) -> Iterator[tuple[str, Row]]:
    left = {source.environment: len(source.rows) for source in sources}
    if empty := sorted(name for name, count in left.items() if not count):
        raise ConfigError(f"no rows for environment {', '.join(map(repr, empty))}")
    for name, row in blend([(source.endless(), source.weight) for source in sources], seed=seed):
        yield name, row
        left[name] -= 1
        if max(left.values()) <= 0:
            return
