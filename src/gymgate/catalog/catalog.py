"""The catalog of an installed nemo-gym."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gymgate.catalog import store
from gymgate.catalog.model import (
    AGENT_KIND,
    PACKAGED_KINDS,
    Environment,
    EnvironmentKind,
    joined_name,
    near,
)
from gymgate.catalog.scan import Scanner, roots_around
from gymgate.errors import ConfigError

_KINDS = (*PACKAGED_KINDS, AGENT_KIND)


class Catalog:
    """The environments of an installed nemo-gym, read from its files without importing any of it.

    `site` is the directory that holds `nemo_gym` and `resources_servers`; `roots` are searched before it, as
    Gym does, for a user's own environments, servers and configs.
    """

    def __init__(self, site: Path, version: str, roots: Sequence[Path] = ()) -> None:
        self.site = site
        self.version = version
        self.roots = (*(Path(root).absolute() for root in roots), site)
        self._scanner = Scanner(self.roots, site)
        self._found: dict[Path, Environment | None] = {}
        self._all: list[Environment] | None = None

    def environments(self, *, progress: Callable[[str], None] | None = None) -> list[Environment]:
        """Return every packaged environment and those under `roots`, sorted by name, then kind.

        The first scan of a release takes a few seconds, which `progress` reports; its result is cached on disk.
        """
        if self._all is None:
            keeps = len(self.roots) == 1
            self._all = store.load(self.site, self.version) if keeps else None
        if self._all is None:
            if progress is not None:
                progress(f"reading the configs of nemo-gym {self.version}, once")
            found = filter(None, (self._at(path, kind) for kind, path in self._directories()))
            self._all = sorted(found, key=lambda item: (item.name, PACKAGED_KINDS.index(item.kind)))
            if keeps:
                store.save(self.site, self.version, self._all)
        return list(self._all)

    def agents(self) -> list[Environment]:
        """Return the release's agents that ship data, as environments, sorted by name."""
        paths = sorted(path for path in (self.site / AGENT_KIND).glob("*") if (path / "data").is_dir())
        found = (self._at(path, AGENT_KIND) for path in paths)
        return [agent for agent in found if agent is not None and agent.data]

    def find(self, name: str, configs: str | Sequence[str] | None = None) -> Environment:
        """Return the environment of that name, with one more config if `configs` are several or name files.

        `Environment.config(configs)` returns that config. Raises `ConfigError` for what there is not.
        """
        environment = self._environment(name)
        names = (configs,) if isinstance(configs, str) else tuple(configs or ())
        paths = [self._config_file(environment, each) for each in names]
        if not names or (len(names) == 1 and any(config.path == paths[0] for config in environment.configs)):
            return environment
        around = dict.fromkeys(root for path in paths for root in roots_around(path, _KINDS))
        config = self._user_scanner(*around).combined(joined_name(names), paths)
        return replace(environment, configs=(*environment.configs, config))

    def _config_file(self, environment: Environment, name: str) -> Path:
        """Return the file of one of an environment's configs, else the file at that path."""
        for config in environment.configs:
            if name.removesuffix(".yaml") in (config.name, config.path.stem):
                return config.path
        bases = (Path.cwd(), *self.roots)
        found = (base / Path(name).expanduser() for base in bases)
        path = next((path for path in found if path.is_file()), None)
        if path is None:
            choices = ", ".join(config.name for config in environment.configs)
            raise ConfigError(
                f"environment {environment.name!r} has no config {name!r}, and there is no such file in {Path.cwd()} or in "
                f"nemo-gym {self.version}; its configs: {choices or 'none'}"
            )
        return path.resolve()

    def _environment(self, name: str) -> Environment:
        """Return the environment called `mcqa` or `environments/mcqa`, or the one in a user's config file or directory.

        A bare name is looked up among resources servers, then environments, then benchmarks. An agent that ships data is
        `responses_api_agents/NAME`. Raises `ConfigError` with near names.
        """
        kinds, bare = PACKAGED_KINDS, name.strip("/")
        for kind in _KINDS:
            if bare.startswith(kind + "/"):
                kinds, bare = (kind,), bare.removeprefix(kind + "/")
        if bare and "/" not in bare and not bare.startswith("."):
            for kind in kinds:
                for root in self.roots:
                    if found := self._at(root / kind / bare, kind):
                        return found
        return self._user_environment(name)

    def _at(self, path: Path, kind: EnvironmentKind) -> Environment | None:
        if path not in self._found:
            self._found[path] = self._scanner.directory(path, kind) if path.is_dir() else None
        return self._found[path]

    def _directories(self) -> Iterator[tuple[EnvironmentKind, Path]]:
        """Yield the kind and directory of each environment. If several roots have it, the first one counts."""
        seen = set[tuple[str, str]]()
        for root in self.roots:
            for kind in PACKAGED_KINDS:
                for path in sorted((root / kind).glob("[!_.]*/")):
                    if (kind, path.name) not in seen:
                        seen.add((kind, path.name))
                        yield kind, path

    def _user_environment(self, name: str) -> Environment:
        path = Path(name).expanduser()
        candidates = (base / path for base in (Path.cwd(), *self.roots))
        found = next((candidate for candidate in candidates if candidate.exists()), None)
        looks_like_path = os.sep in name or path.suffix in (".yaml", ".yml")
        if found is None and path.suffix in (".yaml", ".yml"):
            raise ConfigError(
                f"there is no config file {name!r} in {Path.cwd()} or in nemo-gym {self.version}"
            )
        if not name or found is None or not (looks_like_path or found.is_dir()):
            raise ConfigError(self._unknown(name))
        found = found.resolve()
        # Its config may name files below the working directory or in the tree around it.
        around = roots_around(found, _KINDS)
        scanner = self._user_scanner(*around)
        if not found.is_dir():
            return scanner.file(found)
        environment = scanner.directory(found, "config")
        if environment is None:
            raise ConfigError(f"no NeMo Gym config in directory {name!r}")
        return environment

    def _user_scanner(self, *around: Path) -> Scanner:
        """Return a scanner that also finds files in the trees around a user's config and below the working directory."""
        return Scanner((*self.roots[:-1], *around, Path.cwd(), self.site), self.site)

    def _unknown(self, name: str) -> str:
        known = sorted({path.name for _, path in self._directories() if any(path.rglob("*.yaml"))})
        close = near(name.rpartition("/")[2], known)
        hint = f"near names: {', '.join(close)}" if close else "`gymgate list` shows all"
        return f"no environment {name!r} in nemo-gym {self.version}; {hint}"
