"""What the catalog is made of: environments, their configs, agents, data files and needs. Plain values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from gymgate.catalog.rows import RowsKind, count_rows
from gymgate.errors import ConfigError

NeedKind = Literal[
    "package", "judge", "key", "docker", "download", "git", "gpu", "binary", "config", "search"
]
"""package: from an index, installed on first use; judge: a model server beside the policy's; key: an API key
or an endpoint's URL; docker: a container or sandbox service; download, git: fetched when the server starts or
runs; gpu: torch or vLLM in the server; binary: a program on PATH; config: a value without a default;
search: a web search service."""

EnvironmentKind = Literal["resources_servers", "environments", "benchmarks", "responses_api_agents", "config"]
"""Directory of the release it lies in; `config`: a user's own."""

PACKAGED_KINDS: tuple[EnvironmentKind, ...] = ("resources_servers", "environments", "benchmarks")
"""In the order in which a bare name is looked up."""

AGENT_KIND: EnvironmentKind = "responses_api_agents"
"""Agents that ship data or are environments of their own; found by their full name only."""


@dataclass(frozen=True)
class Need:
    """Something a config needs beside the wheel and a policy: an estimate, from reading files."""

    kind: NeedKind
    detail: str


class Dataset(NamedTuple):
    """A dataset that an agent's config declares; its file may not be packaged."""

    name: str
    type: str
    path: str
    """As the config writes it, relative to a component root."""


@dataclass(frozen=True)
class ServerInstance:
    """A server that a config starts."""

    name: str
    """Top-level key of the config."""
    kind: str
    """`resources_servers`, `responses_api_agents`, `environment_servers` or `responses_api_models`."""
    type: str
    """Directory of its implementation under `kind`."""
    entrypoint: str | None
    """File in that directory; `None`: the config leaves it to another one, so it starts nothing."""


@dataclass(frozen=True)
class AgentInstance:
    """An agent server of a config; rows name it in `agent_ref`."""

    name: str
    type: str
    resources_server: str | None
    """Instance it talks to; `None` for an agent that is its own environment."""
    datasets: tuple[Dataset, ...] = ()


@dataclass(frozen=True)
class EnvConfig:
    """One config file of an environment, with everything it includes and inherits."""

    name: str
    """File stem, or the path below the environment where two files share a stem."""
    path: Path
    agents: tuple[AgentInstance, ...] = ()
    model_servers: tuple[str, ...] = ()
    """Model server instances that it defines or refers to, other than `policy_model`."""
    judges: tuple[tuple[str, str], ...] = ()
    """Those of them that a resources server or an agent names, each with where it does."""
    needs: tuple[Need, ...] = ()
    datasets: tuple[Dataset, ...] = ()
    servers: tuple[ServerInstance, ...] = ()
    """Resources and agent servers."""
    environment_servers: tuple[ServerInstance, ...] = ()
    """Relays in front of agents (0.7.0); gymgate posts to the agent itself."""
    missing: tuple[str, ...] = ()
    """Dotted paths whose value is `???` or an interpolation of something no file defines. Gym's parser refuses
    the config until they are given, those of model servers included."""

    @property
    def need_kinds(self) -> tuple[str, ...]:
        """Kinds of its needs, sorted, each once."""
        return tuple(sorted({need.kind for need in self.needs}))


@dataclass(frozen=True)
class DataFile:
    """A packaged JSONL file."""

    name: str
    """Path below the environment's `data` directory, without the suffix."""
    path: Path
    kind: RowsKind
    """rows: ready to run; raw: no `responses_create_params` yet; rollouts: recorded results; other: neither."""

    def rows(self) -> int:
        """Lines that are not blank; reads the file."""
        return count_rows(self.path)


@dataclass(frozen=True)
class Environment:
    """An environment of an installed nemo-gym, or a user's own config."""

    name: str
    kind: EnvironmentKind
    path: Path
    domain: str | None = None
    description: str | None = None
    configs: tuple[EnvConfig, ...] = ()
    data: tuple[DataFile, ...] = ()

    def config(self, name: str | None = None) -> EnvConfig:
        """The config of that name; `None`: the one named like the environment, else one with a simple agent,
        else any with an agent. Raises `ConfigError` with the choices."""
        if name is None:
            return self._default_config()
        wanted = name.removesuffix(".yaml")
        for config in self.configs:
            if wanted in (config.name, config.path.stem):
                return config
        raise ConfigError(
            f"environment {self.name!r} has no config {name!r}; {choices(c.name for c in self.configs)}"
        )

    def _default_config(self) -> EnvConfig:
        if not self.configs:
            raise ConfigError(f"environment {self.name!r} has no config in {self.path}")
        return min(self.configs, key=self._rank)

    def _rank(self, config: EnvConfig) -> tuple[bool, ...]:
        """Smaller is better; equals stay in the order of the files."""
        runs = bool(config.agents)
        own_name = config.name in (self.name, "config")
        simple = any(agent.type == "simple_agent" for agent in config.agents)
        return (not runs, not own_name, not simple)

    def data_file(self, name: str = "example", config: str | None = None) -> DataFile:
        """The packaged file of that stem, file name or dataset name; `config` decides between datasets that
        share a name. `example` also finds what the config declares as its example data.

        Raises `ConfigError` with the choices.
        """
        found = (
            self._dataset_file(self.config(config), name)
            or self._file_named(name)
            or self._dataset_file_of_any(name)
        )
        if found is None:
            raise ConfigError(self._no_data(name))
        return found

    def recordings(self) -> tuple[DataFile, ...]:
        """Files of recorded rollouts: rows with a `response`."""
        return tuple(file for file in self.data if file.kind == "rollouts")

    def _file_named(self, name: str) -> DataFile | None:
        wanted = name.removesuffix(".jsonl")
        exact = [file for file in self.data if file.name == wanted]
        return next(iter(exact or [file for file in self.data if file.path.stem == wanted]), None)

    def _dataset_file(self, config: EnvConfig, name: str) -> DataFile | None:
        named = [dataset for dataset in config.datasets if dataset.name == name]
        if name == "example":
            named += [dataset for dataset in config.datasets if dataset.type == "example"]
        return next((file for dataset in named for file in self.data if _is_file_of(dataset, file)), None)

    def _dataset_file_of_any(self, name: str) -> DataFile | None:
        return next(filter(None, (self._dataset_file(config, name) for config in self.configs)), None)

    @property
    def known_as(self) -> str:
        """The name by which commands find it and no other."""
        return str(self.path) if self.kind == "config" else f"{self.kind}/{self.name}"

    def _no_data(self, name: str) -> str:
        declared = {dataset.name: dataset.path for config in self.configs for dataset in config.datasets}
        names = [file.name for file in self.data if file.kind in ("rows", "raw", "rollouts")]
        if name in declared:
            what = (
                f"data {name!r} of environment {self.name!r} is not in the wheel ({declared[name]}); "
                f"`gymgate data prepare {self.known_as}` gets it"
            )
        else:
            what = f"environment {self.name!r} has no data {name!r}"
        if names:
            return f"{what}; {choices(names)}, or a path to a JSONL file"
        if declared and name not in declared:
            what += f" (it declares {', '.join(declared)}: `gymgate data prepare {self.known_as}` gets them)"
        return f"{what}; the wheel has no rows for it: give a path to a JSONL file"


def _is_file_of(dataset: Dataset, file: DataFile) -> bool:
    return file.path.as_posix().endswith("/" + dataset.path.lstrip("./"))


def choices(names: Iterable[str]) -> str:
    """`choose one of a, b`, or that there is nothing to choose from."""
    listed = list(dict.fromkeys(names))
    return f"choose one of: {', '.join(listed)}" if listed else "there is none"


def near(name: str, names: Sequence[str]) -> list[str]:
    """Up to five names that look like `name`, the closest first."""
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.6)
    close += [other for other in names if name and (name in other or other in name)]
    return list(dict.fromkeys(close))[:5]
