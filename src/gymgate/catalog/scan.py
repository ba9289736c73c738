"""One environment's directory, or one config file, as an `Environment`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gymgate.catalog.model import (
    AgentInstance,
    DataFile,
    Dataset,
    EnvConfig,
    Environment,
    EnvironmentKind,
    Need,
    ServerInstance,
)
from gymgate.catalog.needs import (
    config_needs,
    judge_references,
    missing_values,
    required_needs,
    servers_of,
)
from gymgate.catalog.parse import (
    AGENTS,
    MISSING,
    MODELS,
    RELAYS,
    RESOURCES,
    ConfigProblem,
    ConfigReader,
    Node,
)
from gymgate.catalog.requirements import Installed, local_requirements, read_requirements
from gymgate.catalog.rows import kind_of_file
from gymgate.catalog.servercode import CodeReader
from gymgate.config import POLICY

_NO_CONFIGS = {"prompts", "prompt_templates", "tests", "data"}


class Scanner:
    """Reads environments below some component roots; files read once serve every environment."""

    def __init__(self, roots: Sequence[Path], site: Path, version: str) -> None:
        self._roots = tuple(roots)
        self._reader = ConfigReader(self._roots, version)
        self._code = CodeReader(self._roots)
        self._installed = Installed(site)
        self._server_needs: dict[tuple[Path, str], list[Need]] = {}
        self._requirements: dict[Path, tuple[str, ...]] = {}

    def directory(self, path: Path, kind: EnvironmentKind) -> Environment | None:
        """The environment in a directory; `None` if no file in it is a config."""
        below = "*.yaml" if kind == "config" else "**/*.yaml"
        files = [file for file in _yaml_files(path, below) if self._is_config(file)]
        if not files:
            return None
        twice = Counter(file.stem for file in files)
        names = [file.stem if twice[file.stem] == 1 else _below(file, path) for file in files]
        return self._environment(path.name, kind, path, dict(zip(names, files, strict=True)))

    def file(self, path: Path) -> Environment:
        """A single config file as an environment of its own; one in `configs` belongs to the directory above."""
        home = path.parent.parent if path.parent.name == "configs" else path.parent
        return self._environment(path.stem, "config", home, {path.stem: path})

    def requirements(self, servers: Iterable[ServerInstance]) -> tuple[str, ...]:
        """What the installed nemo-gym lacks of these servers' requirements; sorted, each once."""
        found: set[str] = set()
        for server in servers:
            directory = self._directory(server)
            if directory is not None:
                if directory not in self._requirements:
                    wanted = read_requirements(directory, self._installed)
                    self._requirements[directory] = tuple(
                        line for line in wanted if not self._installed.satisfies(line)
                    )
                found.update(self._requirements[directory])
        return tuple(sorted(found))

    def _environment(
        self, name: str, kind: EnvironmentKind, path: Path, files: dict[str, Path]
    ) -> Environment:
        read = [self._config(config_name, file) for config_name, file in files.items()]
        configs = tuple(config for config, _ in read)
        data = self._data(path, configs, "**/*.jsonl" if kind != "config" else "*.jsonl")
        bare = Environment(name=name, kind=kind, path=path, configs=configs, data=data)
        default = bare.config()
        described = [_described(node, config.servers, name) for config, node in read]
        domain, text = described[configs.index(default)]
        manifest = self._manifest(path)
        return Environment(
            name=name,
            kind=kind,
            path=path,
            domain=domain
            or next((domain for domain, _ in described if domain), None)
            or manifest.get("domain"),
            description=text or manifest.get("description"),
            configs=configs,
            data=data,
        )

    def _config(self, name: str, path: Path) -> tuple[EnvConfig, Node]:
        try:
            node = self._reader.read(path)
        except ConfigProblem as problem:
            return EnvConfig(name, path, needs=(Need("config", f"does not load: {problem}"),)), {}
        every = servers_of(node)
        servers = tuple(server for server in every if server.kind in (RESOURCES, AGENTS))
        agents = tuple(_agent(server, node) for server in servers if server.kind == AGENTS)
        judges = judge_references(node, servers)
        models = [server.name for server in every if server.kind == MODELS] + list(judges)
        config = EnvConfig(
            name=name,
            path=path,
            agents=agents,
            model_servers=tuple(sorted({model for model in models if model not in (POLICY, MISSING)})),
            judges=tuple(judges.items()),
            needs=tuple(dict.fromkeys([*config_needs(node, servers), *self._servers_need(servers, node)])),
            datasets=tuple(dict.fromkeys(dataset for agent in agents for dataset in agent.datasets)),
            servers=servers,
            environment_servers=tuple(server for server in every if server.kind == RELAYS),
            missing=missing_values(node),
        )
        return config, node

    def _servers_need(self, servers: Sequence[ServerInstance], node: Node) -> list[Need]:
        found: list[Need] = []
        for server in servers:
            directory = self._directory(server)
            if directory is None:
                found.append(Need("config", f"{server.kind}/{server.type} of {server.name} is not installed"))
            elif server.entrypoint:
                required = self._code.required(directory, server.entrypoint)
                found += required_needs(node, server, required)
                found += self._code_needs(directory, server.entrypoint)
        if not any(server.kind == AGENTS for server in servers):
            found.append(Need("config", "defines no agent"))
        return found + self._package_needs(servers)

    def _code_needs(self, directory: Path, entrypoint: str) -> list[Need]:
        key = (directory, entrypoint)
        if key not in self._server_needs:
            self._server_needs[key] = self._code.needs(directory, entrypoint)
        return self._server_needs[key]

    def _package_needs(self, servers: Sequence[ServerInstance]) -> list[Need]:
        lines = self.requirements(servers)
        found = [
            Need("download", f"{line.partition('@')[0].strip()} is built from git")
            for line in lines
            if "git+" in line
        ]
        directories = {self._directory(server) for server in servers}
        local = {line for path in directories if path for line in local_requirements(path)}
        found += [Need("package", f"{line} (beside the server, not on an index)") for line in sorted(local)]
        return found + ([Need("package", ", ".join(lines))] if lines else [])

    def _directory(self, server: ServerInstance) -> Path | None:
        return self._reader.locate(f"{server.kind}/{server.type}")

    def _data(self, path: Path, configs: Sequence[EnvConfig], below: str) -> tuple[DataFile, ...]:
        files = sorted({*path.glob(below), *(path / "data").glob(below)})
        declared = (dataset.path for config in configs for dataset in config.datasets)
        files += [file for name in declared if (file := self._reader.locate(name)) and file.is_file()]
        unique = list(dict.fromkeys(files))
        return tuple(DataFile(_data_name(file, path), file, kind_of_file(file)) for file in unique)

    def _is_config(self, path: Path) -> bool:
        try:
            node = self._reader.load(path)
        except ConfigProblem:
            return path.parent.name == "configs"
        return isinstance(node.get("config_paths"), list) or any(
            isinstance(value, dict) and not {*value}.isdisjoint((RESOURCES, AGENTS, MODELS, "_inherit_from"))
            for value in node.values()
        )

    def _manifest(self, path: Path) -> Node:
        try:
            return self._reader.load(path / "manifest.yaml")
        except ConfigProblem:
            return {}


def _yaml_files(path: Path, below: str) -> list[Path]:
    """YAML files that may be configs; a user's directory is not searched deeper than `configs`."""
    found = {*path.glob(below), *(path / "configs").glob(below)}
    return sorted(
        file
        for file in found
        if file.name != "manifest.yaml" and _NO_CONFIGS.isdisjoint(file.relative_to(path).parts[:-1])
    )


def _below(file: Path, path: Path) -> str:
    return file.relative_to(path).with_suffix("").as_posix().removeprefix("configs/")


def _data_name(file: Path, path: Path) -> str:
    if path not in file.parents:
        return file.stem
    return file.relative_to(path).with_suffix("").as_posix().removeprefix("data/")


def _agent(server: ServerInstance, node: Node) -> AgentInstance:
    block = node[server.name][AGENTS][server.type]
    resources = block.get("resources_server")
    name = resources.get("name") if isinstance(resources, dict) else None
    datasets = [item for item in block.get("datasets") or () if isinstance(item, dict)]
    return AgentInstance(
        name=server.name,
        type=server.type,
        resources_server=None if name == MISSING else name,
        datasets=tuple(
            Dataset(str(item.get("name")), str(item.get("type")), str(item.get("jsonl_fpath")))
            for item in datasets
        ),
    )


def _described(node: Node, servers: Sequence[ServerInstance], name: str) -> tuple[str | None, str | None]:
    """Domain and description: of the resources server named like the environment, else of any server."""
    ordered = sorted(servers, key=lambda server: (server.kind != RESOURCES, server.type != name))
    blocks: list[dict[str, Any]] = [node[server.name][server.kind][server.type] for server in ordered]
    domain = next((block["domain"] for block in blocks if isinstance(block.get("domain"), str)), None)
    text = next((block["description"] for block in blocks if isinstance(block.get("description"), str)), None)
    return domain, " ".join(text.split()) if text else None
