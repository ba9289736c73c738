"""The environments and rows that `NeMoGymSpec` names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from gymgate.api import load_catalog
from gymgate.catalog import Environment
from gymgate.config import EnvironmentConfig, StackConfig
from gymgate.dataset import Row, open_rows
from gymgate.errors import ConfigError
from gymgate.integrations.training.sources import Source


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
    weights: Mapping[str, float], data: str | Mapping[str, str], config: StackConfig
) -> list[Source]:
    """The rows of each environment; `data` names one source for all, or one for each. `ConfigError` where there are none."""
    catalog = load_catalog(config.runtime)
    described = {environment.name: environment for environment in config.environments}
    sources = []
    for name, weight in weights.items():
        environment, named = catalog.find(name), data if isinstance(data, str) else data.get(name)
        if named is None:
            raise ConfigError(
                f"data names no rows for environment {name!r}; it has {', '.join(sorted(data))}"
            )
        agents = _agents(environment, described.get(name))
        sources.append(Source(environment.name, open_rows(named, environment=environment), weight, agents))
    return sources


def _agents(environment: Environment, described: EnvironmentConfig | None) -> frozenset[str] | None:
    """The agents that the stack starts for an environment; `None` where overrides may change them."""
    if described is None or described.overrides:
        return None
    return frozenset(agent.name for agent in environment.config(described.config).agents)


def in_turn(sources: Sequence[Source]) -> Iterator[tuple[str, Row]]:
    """Every row of every source once."""
    return chain.from_iterable(source.named() for source in sources)
