"""Environments, their configs and their data files. Plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gymgate.core import codec
from gymgate.core.config import POLICY
from gymgate.core.errors import ConfigError
from gymgate.gym.catalog.needs import (
    Need,
    judge_references,
    judges_with_policy,
    model_references,
    runs_text_of,
)
from gymgate.gym.inside.resolve import (
    AGENTS,
    ENVIRONMENT_SERVERS,
    MISSING,
    MODELS,
    SandboxReference,
    ServerInstance,
)
from gymgate.rollouts.row_fields import flat_row

RowsKind = Literal["rows", "raw", "rollouts", "other"]
EnvironmentKind = Literal["resources_servers", "environments", "benchmarks", "responses_api_agents", "config"]
"""The directory of the release that holds it; `config`: it is a user's own."""

PACKAGED_KINDS: tuple[EnvironmentKind, ...] = ("resources_servers", "environments", "benchmarks")
"""In the order in which a bare name is looked up."""

AGENT_KIND: EnvironmentKind = "responses_api_agents"
"""Agents that ship data or need no resources server. They are found by their full name only."""


REGISTRY_ONLY = "it is only in NVIDIA's own registry, which gymgate does not reach"


@dataclass(frozen=True)
class Dataset:
    """A dataset that an agent's config declares; its file may not be packaged."""

    name: str
    type: str
    path: str
    """As the config writes it, relative to a component root."""
    license: str | None = None
    is_in_registry: bool = False
    """Whether the config names only NVIDIA's own registry for it, which `gymgate data prepare` does not reach."""


def _is_in_registry(item: Mapping[str, Any]) -> bool:
    """Whether an entry of `datasets` names NVIDIA's own registry and no other place."""
    source = item.get("source") or {}
    registry = item.get("gitlab_identifier") or source
    others = (item.get("huggingface_identifier"), source.get("repo_id"), item.get("prepare_script"))
    return bool(registry.get("dataset_name")) and not any(others)


@dataclass(frozen=True)
class EnvConfig:
    """One config file of an environment, with everything it includes and inherits."""

    name: str
    """File stem, or the path below the environment where two files share a stem."""
    path: Path
    instances: tuple[ServerInstance, ...] = ()
    """Every server that it names, including model servers and the relays that 0.7.0 puts in front of agents."""
    needs: tuple[Need, ...] = ()
    requirements: tuple[str, ...] = ()
    """PyPI requirements of its resources servers and agents that the installed nemo-gym does not meet, sorted. nemo-gym
    itself and editable lines are left out."""
    sandboxes: tuple[SandboxReference, ...] = ()
    """The settings with which its servers choose a sandbox provider."""
    files: tuple[Path, ...] = ()
    """The config files in order, if it was put together of several; `path` is the first."""
    missing: tuple[str, ...] = ()
    """Dotted paths whose value is `???` or interpolates a key that no file defines. NeMo Gym's parser refuses the config
    until they are given."""

    @property
    def all_files(self) -> tuple[Path, ...]:
        """The config files that make it, in order; those that they include are left out."""
        return self.files or (self.path,)

    @property
    def servers(self) -> tuple[ServerInstance, ...]:
        """Resources servers, agents and environment servers, without relays."""
        return tuple(server for server in self.instances if server.kind != MODELS and not server.is_relay)

    @property
    def agents(self) -> tuple[ServerInstance, ...]:
        """Agents; rows name one in `agent_ref`."""
        return tuple(server for server in self.instances if server.kind == AGENTS)

    @property
    def environment_servers(self) -> tuple[ServerInstance, ...]:
        """Those that own an episode; relays, which pass rows on to an agent, are left out."""
        return tuple(server for server in self.servers if server.kind == ENVIRONMENT_SERVERS)

    @property
    def row_targets(self) -> tuple[str, ...]:
        """The names that rows may have: its agents, in `agent_ref`, and environment servers, in `_ng_environment_server`."""
        return tuple(server.name for server in (*self.agents, *self.environment_servers))

    @property
    def datasets(self) -> tuple[Dataset, ...]:
        """The datasets that its agents declare, each once."""
        declared = (item for agent in self.agents for item in agent.block.get("datasets") or ())
        items = (item for item in declared if isinstance(item, dict))
        return tuple(
            dict.fromkeys(
                Dataset(
                    str(item.get("name")),
                    str(item.get("type")),
                    str(item.get("jsonl_fpath")),
                    str(item["license"]) if item.get("license") else None,
                    _is_in_registry(item),
                )
                for item in items
            )
        )

    @property
    def judges(self) -> dict[str, str]:
        """Model servers other than the policy's that a resources server or agent names, each with the setting that names it."""
        return judge_references(self.servers)

    @property
    def model_servers(self) -> tuple[str, ...]:
        """Model servers other than the policy's that it defines or refers to, sorted."""
        defined = {server.name for server in self.instances if server.kind == MODELS}
        referenced = {name for name in model_references(self.servers) if "${" not in name}
        return tuple(sorted({*defined, *referenced} - {POLICY, MISSING}))

    @property
    def is_self_judged(self) -> bool:
        """Whether the policy's own model judges, or plays the user, unless another endpoint is given."""
        return any(judges_with_policy(server) for server in self.servers)

    @property
    def runs_code(self) -> bool:
        """Whether one of its servers or agents is known to run model-written code with the user's rights, unless its settings
        confine it."""
        return runs_text_of("answer", self.servers)

    @property
    def runs_rows(self) -> bool:
        """Whether one of its servers or agents is known to run code of rows with the user's rights."""
        return runs_text_of("row", self.servers)

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
    lines: int | None = field(default=None, compare=False)
    """Lines that are not blank; `None`: they were not counted yet."""

    def rows(self) -> int:
        """Return the number of lines that are not blank."""
        if self.lines is not None:
            return self.lines
        with self.path.open("rb") as file:
            return sum(1 for line in file if not line.isspace())


def kind_of_file(path: Path) -> RowsKind:
    """Return the kind of a JSONL file, judged by its first line that is not blank."""
    try:
        with path.open("rb") as file:
            return _kind_of_row(codec.loads(next((line for line in file if not line.isspace()), b"")))
    except (OSError, ValueError):
        return "other"


def _kind_of_row(row: Any) -> RowsKind:
    if not isinstance(row, dict):
        return "other"
    params = flat_row(row).get("responses_create_params")
    if isinstance(params, dict) and "input" in params:
        return "rollouts" if isinstance(row.get("response"), dict) else "rows"
    return "other" if any("reward" in key for key in row) else "raw"


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
    images: tuple[str, ...] | None = field(default=None, compare=False)
    """The images that its rows name, from the scan of its release; `None`: it has none."""
    tools: tuple[str, ...] | None = field(default=None, compare=False)
    """Names of the tools that its rows offer to the policy, from the scan of its release; `None`: it has none."""
    reward: str | None = field(default=None, compare=False)
    """What its reward is, and the place in the release's files that says so, from the scan; `None`: it is not known."""

    def config(self, name: str | Sequence[str] | None = None) -> EnvConfig:
        """Return the config of that name; of several names, the one that `Catalog.find` put together of them. `None` means
        the one named like the environment, else one with a simple agent, else any with an agent.

        Raises `ConfigError` with the choices.
        """
        if not self.configs:
            raise ConfigError(f"environment {self.name!r} has no config in {self.path}")
        if name is None:
            return min(self.configs, key=self._rank)
        name = joined_name(name)
        stem = name.removesuffix(".yaml")
        for config in self.configs:
            if name == config.name or (not config.files and stem in (config.name, config.path.stem)):
                return config
        raise ConfigError(
            f"environment {self.name!r} has no config {name!r}; {_choices(c.name for c in self.configs)}"
        )

    def _rank(self, config: EnvConfig) -> tuple[bool, ...]:
        """Return a sort key: the best default config has the smallest."""
        runs = bool(config.agents)
        own_name = config.name in (self.name, "config")
        simple = any(agent.type == "simple_agent" for agent in config.agents)
        return (not runs, not own_name, not simple)

    def data_file(self, name: str = "example") -> DataFile:
        """Return the packaged file with that stem, file name or dataset name. The default config decides between datasets
        that share a name. `example` also finds datasets of the type `example`.

        Raises `ConfigError` with the choices.
        """
        stem = name.removesuffix(".jsonl")
        files = [
            *self._declared_files(self.config(), name),
            *(file for file in self.data if file.name == stem),
            *(file for file in self.data if file.path.stem == stem),
            *(file for declaring in self.configs for file in self._declared_files(declaring, name)),
        ]
        if not files:
            raise ConfigError(self._no_data(name))
        return files[0]

    @property
    def needs_data(self) -> bool:
        """Whether the release has no rows of it that can be run: they are to be prepared or given."""
        try:
            return self.data_file().kind != "rows"
        except ConfigError:
            return True

    @property
    def need_kinds(self) -> tuple[str, ...]:
        """What the default config needs: `data` without rows, `self-judged` if the policy judges, and its other needs."""
        config = self.config()
        first = {"data": self.needs_data, "self-judged": config.is_self_judged}
        return (*(name for name, holds in first.items() if holds), *config.need_kinds)

    @property
    def licences(self) -> tuple[str, ...]:
        """The licences that the datasets of all its configs state, sorted."""
        stated = {dataset.license for config in self.configs for dataset in config.datasets}
        return tuple(sorted(licence for licence in stated if licence and licence != "TBD"))

    def can_prepare(self, datasets: Iterable[Dataset]) -> bool:
        """Whether `gymgate data prepare` may get one of these datasets: not all are in NVIDIA's own registry alone."""
        return any(not dataset.is_in_registry or self._has_script(dataset) for dataset in datasets)

    def stated_rows(self, dataset: Dataset) -> int | None:
        """Return how many rows a dataset has by the metrics file that NeMo Gym ships for it; `None`: it ships no figure."""
        path = self.path.parent.parent / Path(dataset.path).with_suffix("")
        try:
            stated = codec.loads(path.with_name(f"{path.name}_metrics.json").read_bytes())
            return int(stated["Number of examples"]) // (stated.get("num_repeats") or 1) or None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _has_script(self, dataset: Dataset) -> bool:
        """Whether a `prepare.py` lies next to a dataset's directory; before installation, whether it is where most have one."""
        if not self.path.is_absolute():
            return dataset.path.startswith("environments/")
        return (self.path.parent.parent / Path(dataset.path).parent.parent / "prepare.py").exists()

    @property
    def verified(self) -> bool | None:
        """NeMo Gym's own `verified` of the default config's servers; `None`: it does not say."""
        marks = [server.block["verified"] for server in self.config().servers if "verified" in server.block]
        return all(mark is True for mark in marks) if marks else None

    def recordings(self) -> tuple[DataFile, ...]:
        """Return the files of recorded rollouts: rows with a `response`."""
        return tuple(file for file in self.data if file.kind == "rollouts")

    def _declared_files(self, config: EnvConfig, name: str) -> Iterator[DataFile]:
        """Yield the packaged files of a config's datasets of that name."""
        datasets = [dataset for dataset in config.datasets if dataset.name == name]
        if name == "example":
            datasets += [dataset for dataset in config.datasets if dataset.type == "example"]
        for dataset in datasets:
            end = "/" + dataset.path.lstrip("./")
            yield from (file for file in self.data if f"/{file.path.as_posix()}".endswith(end))

    @property
    def known_as(self) -> str:
        """The name that means this environment and no other on the command line."""
        if self.kind != "config":
            return f"{self.kind}/{self.name}"
        own = [config.path for config in self.configs if not config.files]
        return str(own[0] if [path.stem for path in own] == [self.name] else self.path)

    def _no_data(self, name: str) -> str:
        datasets = [dataset for config in self.configs for dataset in config.datasets]
        declared = {dataset.name: dataset.path for dataset in datasets}
        asked = [dataset for dataset in datasets if dataset.name == name]
        prepare = f"`gymgate data prepare {self.known_as}`"
        names = [file.name for file in self.data if file.kind in ("rows", "raw", "rollouts")]
        if name in declared:
            what = f"data {name!r} of environment {self.name!r} is not in the wheel ({declared[name]}); " + (
                f"{prepare} gets it" if self.can_prepare(asked) else REGISTRY_ONLY
            )
        else:
            what = f"environment {self.name!r} has no data {name!r}"
        if names:
            return f"{what}; {_choices(names)}, or a path to a JSONL file"
        if declared and name not in declared and self.can_prepare(datasets):
            return f"{what}: NeMo Gym ships no rows for it. Run {prepare} ({', '.join(declared)}), then give them: --data FILE"
        return f"{what}: NeMo Gym ships no rows for it; give a path to a JSONL file"


def joined_name(names: str | Sequence[str]) -> str:
    """Return the name of a config that is put together of several: `a+b.yaml`."""
    return names if isinstance(names, str) else "+".join(names)


def _choices(names: Iterable[str]) -> str:
    return f"choose one of: {', '.join(dict.fromkeys(names))}"
