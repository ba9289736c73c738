"""Reads an environment's directory, or one config file, into an `Environment`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gymgate.core.errors import ConfigError
from gymgate.gym.catalog.entries import DataFile, EnvConfig, Environment, EnvironmentKind, kind_of_file
from gymgate.gym.catalog.needs import Need, config_needs, missing_values
from gymgate.gym.catalog.parse import ConfigProblem, ConfigReader
from gymgate.gym.catalog.requirements import Distributions, local_requirements, read_requirements
from gymgate.gym.inside.resolve import (
    AGENTS,
    RESOURCES,
    SERVER_KINDS,
    Node,
    ServerInstance,
    sandbox_references,
    servers_of,
)

_NO_CONFIGS = {"prompts", "prompt_templates", "tests", "data"}


class Scanner:
    """Reads environments below some component roots; files read once serve every environment.

    `source_needs` returns the needs that the source of a server in a directory shows. Only the scans that ship have them.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        site: Path,
        source_needs: Callable[[ServerInstance, Path], Iterable[Need]] = lambda server, directory: (),
    ) -> None:
        self._reader = ConfigReader(roots)
        self._source_needs = source_needs
        self._installed = Distributions(site)
        self._requirements: dict[Path, list[str]] = {}

    def directory(self, path: Path, kind: EnvironmentKind) -> Environment | None:
        """Return the environment in a directory; `None` if no file in it is a config."""
        below = "*.yaml" if kind == "config" else "**/*.yaml"
        files = [file for file in _yaml_files(path, below) if self._is_config(file)]
        if not files:
            return None
        twice = Counter(file.stem for file in files)
        names = [file.stem if twice[file.stem] == 1 else _name(file, path, "configs/") for file in files]
        return self._environment(path.name, kind, path, dict(zip(names, files, strict=True)))

    def file(self, path: Path) -> Environment:
        """Return a single config file as an environment. A file in `configs` belongs to the directory above."""
        directory = path.parent.parent if path.parent.name == "configs" else path.parent
        return self._environment(path.stem, "config", directory, {path.stem: path})

    def _environment(
        self, name: str, kind: EnvironmentKind, path: Path, files: dict[str, Path]
    ) -> Environment:
        configs = tuple(self._config(config_name, file) for config_name, file in files.items())
        data = self.data(path, kind, configs)
        environment = Environment(name=name, kind=kind, path=path, configs=configs, data=data)
        manifest = self._manifest(path)
        default = environment.config()
        domains = (_setting(config, "domain", name) for config in (default, *configs))
        description = _setting(default, "description", name)
        return replace(
            environment,
            domain=next(filter(None, domains), manifest.get("domain")),
            description=" ".join(description.split()) if description else manifest.get("description"),
        )

    def combined(self, name: str, paths: Sequence[Path]) -> EnvConfig:
        """Return the config that several files make in this order. Raises `ConfigError` if one cannot be read."""
        config = self._config(name, *paths)
        if not config.instances:
            reasons = "; ".join(need.detail for need in config.needs)
            raise ConfigError(f"config {name!r} cannot be used: {reasons or 'it has no server'}")
        return replace(config, files=tuple(paths))

    def _config(self, name: str, path: Path, *more: Path) -> EnvConfig:
        try:
            node = self._reader.read(path, *more)
        except ConfigProblem as problem:
            return EnvConfig(name, path, needs=(Need("config", f"does not load: {problem}"),))
        config = EnvConfig(
            name,
            path,
            instances=tuple(servers_of(node)),
            missing=missing_values(node),
            sandboxes=tuple(sandbox_references(node)),
        )
        paths = (self._directory(server) for server in config.servers)
        directories = [directory for directory in paths if directory is not None]
        requirements = sorted({line for path in directories for line in self._unmet_requirements(path)})
        needs = [
            *config_needs(node, config.servers),
            *self._servers_need(config.servers),
            *_package_needs(directories, requirements),
        ]
        return replace(config, needs=tuple(dict.fromkeys(needs)), requirements=tuple(requirements))

    def _servers_need(self, servers: Sequence[ServerInstance]) -> Iterator[Need]:
        for server in servers:
            directory = self._directory(server)
            if directory is None:
                yield Need("config", f"{server.kind}/{server.type} of {server.name} is not installed")
            elif server.entrypoint:
                yield from self._source_needs(server, directory)
        if not any(server.kind == AGENTS for server in servers):
            yield Need("config", "defines no agent")

    def _unmet_requirements(self, directory: Path) -> list[str]:
        """Return the requirements of the server in a directory that the installed nemo-gym does not meet."""
        if directory not in self._requirements:
            requirements = read_requirements(directory, self._installed)
            self._requirements[directory] = [
                line for line in requirements if not self._installed.satisfies(line)
            ]
        return self._requirements[directory]

    def _directory(self, server: ServerInstance) -> Path | None:
        return self._reader.locate(f"{server.kind}/{server.type}")

    def data(self, path: Path, kind: EnvironmentKind, configs: Sequence[EnvConfig]) -> tuple[DataFile, ...]:
        """Return the data files of an environment: in its directory, in `data` below, and those that its configs declare."""
        below = "**/*.jsonl" if kind != "config" else "*.jsonl"
        files = sorted({*path.glob(below), *(path / "data").glob(below)})
        declared = (dataset.path for config in configs for dataset in config.datasets)
        files += [file for name in declared if (file := self._reader.locate(name)) and file.is_file()]
        return tuple(
            DataFile(_name(file, path, "data/"), file, kind_of_file(file)) for file in dict.fromkeys(files)
        )

    def _is_config(self, path: Path) -> bool:
        try:
            node = self._reader.load(path)
        except ConfigProblem:
            return path.parent.name == "configs"
        return isinstance(node.get("config_paths"), list) or any(
            isinstance(value, dict) and not {*value}.isdisjoint((*SERVER_KINDS, "_inherit_from"))
            for value in node.values()
        )

    def _manifest(self, path: Path) -> Node:
        try:
            return self._reader.load(path / "manifest.yaml")
        except ConfigProblem:
            return {}


def roots_around(path: Path, kinds: Iterable[str]) -> list[Path]:
    """Return the parents of a file that are laid out as component roots: they have a directory of one of these kinds."""
    return [parent for parent in path.parents if any((parent / kind).is_dir() for kind in kinds)]


def _yaml_files(path: Path, below: str) -> list[Path]:
    """Return the YAML files that may be configs. A user's directory is searched no deeper than `configs`."""
    files = {*path.glob(below), *(path / "configs").glob(below)}
    return sorted(
        file
        for file in files
        if file.name != "manifest.yaml" and _NO_CONFIGS.isdisjoint(file.relative_to(path).parts[:-1])
    )


def _name(file: Path, directory: Path, usual: str) -> str:
    """Return a file's path below its environment's directory, without the usual subdirectory and the suffix."""
    if directory not in file.parents:
        return file.stem
    return file.relative_to(directory).with_suffix("").as_posix().removeprefix(usual)


def _package_needs(directories: Sequence[Path], requirements: Sequence[str]) -> Iterator[Need]:
    for line in requirements:
        if "git+" in line:
            yield Need("download", f"{line.partition('@')[0].strip()} is built from git")
    for line in sorted({line for path in directories for line in local_requirements(path)}):
        yield Need("package", f"{line} (beside the server, not on an index)")
    if requirements:
        yield Need("package", ", ".join(requirements))


def _setting(config: EnvConfig, key: str, name: str) -> str | None:
    """Return a text setting of the resources server named like the environment, else of the first server that has it."""
    ordered = sorted(config.servers, key=lambda server: (server.kind != RESOURCES, server.type != name))
    texts = (server.block.get(key) for server in ordered)
    return next((text for text in texts if isinstance(text, str)), None)
