"""What a config of an environment says of its servers, data, needs and sandboxes, for `gymgate info`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gymgate.gym.catalog.entries import Dataset, EnvConfig, Environment
from gymgate.gym.catalog.needs import Need
from gymgate.gym.inside.resolve import MISSING, SandboxReference, walk

_IMAGE = re.compile(r"(?:^|[._])(?:image|container_formatter)$")
"""Settings that name an image."""


@dataclass(frozen=True)
class AgentDescription:
    """An agent of a config."""

    name: str
    type: str
    resources_server: str | None


@dataclass(frozen=True)
class EnvironmentServerDescription:
    """An environment server of a config that owns its episodes."""

    name: str
    type: str
    agents: Sequence[str]
    """The agents that it calls."""


@dataclass(frozen=True)
class SandboxDescription:
    """A setting with which a server chooses its sandbox."""

    server: str
    setting: str
    """Its dotted key."""
    name: str | None
    """The block of the config that it names."""
    provider: str | None
    """`None`: to be chosen with `--sandbox`."""
    images: Sequence[str]


@dataclass(frozen=True)
class ConfigDescription:
    """A config of an environment."""

    name: str
    path: Path
    agents: Sequence[AgentDescription]
    environment_servers: Sequence[EnvironmentServerDescription]
    """Those that own its episodes; relays to an agent are left out."""
    model_servers: Sequence[str]
    """Model servers other than the policy's."""
    datasets: Sequence[Dataset]
    needs: Sequence[Need]
    sandboxes: Sequence[SandboxDescription]
    requirements: Sequence[str]
    """Python requirements that the release does not meet."""
    missing: Sequence[str]
    """Dotted keys without a value."""


def describe_config(config: EnvConfig) -> ConfigDescription:
    """Return what a config says."""
    return ConfigDescription(
        name=config.name,
        path=config.path,
        agents=[AgentDescription(agent.name, agent.type, agent.resources_server) for agent in config.agents],
        environment_servers=[
            EnvironmentServerDescription(server.name, server.type, server.called_agents)
            for server in config.environment_servers
        ],
        model_servers=config.model_servers,
        datasets=config.datasets,
        needs=config.needs,
        sandboxes=[describe_sandbox(config, reference) for reference in config.sandboxes],
        requirements=config.requirements,
        missing=config.missing,
    )


def describe_sandbox(config: EnvConfig, reference: SandboxReference) -> SandboxDescription:
    """Return how a server chooses its sandbox."""
    server = next(server for server in config.servers if reference.setting.startswith(f"{server.key}."))
    images = [
        value
        for path, value in walk(server.block)
        if _IMAGE.search(path) and isinstance(value, str) and value not in ("", MISSING)
    ]
    return SandboxDescription(
        server=server.name,
        setting=reference.setting,
        name=reference.name,
        provider=reference.provider,
        images=list(dict.fromkeys(images)),
    )


def unshipped_datasets(environment: Environment, config: EnvConfig) -> list[Dataset]:
    """Return the datasets that a config declares and the release does not have."""
    paths = [file.path.as_posix() for file in environment.data]
    return [dataset for dataset in config.datasets if not any(path.endswith(dataset.path) for path in paths)]
