"""The catalog of an installed nemo-gym."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from gymgate.catalog import store
from gymgate.catalog.model import AGENT_KIND, PACKAGED_KINDS, EnvConfig, Environment, EnvironmentKind, near
from gymgate.catalog.scan import Scanner
from gymgate.errors import ConfigError


class Catalog:
    """What an installed nemo-gym offers, read from its files; nothing of it is imported.

    `site` is the directory that holds `nemo_gym` and `resources_servers`; `roots` are searched before it, as
    Gym does, for a user's own environments, servers and configs.
    """

    def __init__(self, site: Path, version: str, roots: Sequence[Path] = ()) -> None:
        self.site = site
        self.version = version
        self.roots = (*(Path(root).absolute() for root in roots), site)
        self._scanner = Scanner(self.roots, site, version)
        self._found: dict[Path, Environment | None] = {}
        self._all: list[Environment] | None = None

    def environments(self, *, progress: Callable[[str], None] | None = None) -> list[Environment]:
        """Every packaged environment and those under `roots`, sorted by name, then kind. The scan of the
        release is kept in the cache directory; the first one takes a few seconds, of which `progress` is told."""
        if self._all is None:
            stored = store.load(self.site, self.version) if len(self.roots) == 1 else None
            if stored is None:
                if progress is not None:
                    progress(f"reading the configs of nemo-gym {self.version}, once")
                found = (self._at(path, kind) for kind, path in self._directories())
                stored = [environment for environment in found if environment is not None]
                if len(self.roots) == 1:
                    store.save(self.site, self.version, stored)
            self._all = sorted(stored, key=lambda item: (item.name, PACKAGED_KINDS.index(item.kind)))
        return list(self._all)

    def agents(self) -> list[Environment]:
        """Agents of the release that ship data, as environments, sorted by name."""
        paths = sorted(path for path in (self.site / AGENT_KIND).glob("*") if (path / "data").is_dir())
        found = (self._at(path, AGENT_KIND) for path in paths)
        return [agent for agent in found if agent is not None and agent.data]

    def find(self, name: str) -> Environment:
        """The environment called `mcqa` or `environments/mcqa`, or the one in a user's config file or directory.

        A bare name means a resources server first, then an environment, then a benchmark; an agent that brings its
        own data is `responses_api_agents/NAME`. Raises `ConfigError` with near names.
        """
        kinds = PACKAGED_KINDS
        bare = name.strip("/")
        for kind in (*PACKAGED_KINDS, AGENT_KIND):
            if bare.startswith(kind + "/"):
                kinds, bare = (kind,), bare.removeprefix(kind + "/")
        if bare and "/" not in bare and not bare.startswith("."):
            for kind in kinds:
                for root in self.roots:
                    if found := self._at(root / kind / bare, kind):
                        return found
        return self._user_environment(name)

    def requirements(self, environment: Environment, config: EnvConfig) -> tuple[str, ...]:
        """PyPI requirements of the resources servers and agents that `config` starts, sorted: those that this
        site does not already satisfy. nemo-gym itself and editable lines are left out; model servers need
        none, since gymgate takes their place."""
        scanner = self._user_scanner(environment.path) if environment.kind == "config" else self._scanner
        return scanner.requirements(config.servers)

    def _user_scanner(self, path: Path) -> Scanner:
        """A user's config may name files below the working directory and below the tree that it lies in."""
        around = tuple(
            parent
            for parent in path.parents
            if any((parent / kind).is_dir() for kind in (*PACKAGED_KINDS, AGENT_KIND))
        )
        return Scanner((*self.roots[:-1], *around, Path.cwd(), self.site), self.site, self.version)

    def _at(self, path: Path, kind: EnvironmentKind) -> Environment | None:
        if path not in self._found:
            self._found[path] = self._scanner.directory(path, kind) if path.is_dir() else None
        return self._found[path]

    def _directories(self) -> list[tuple[EnvironmentKind, Path]]:
        """Each environment's directory, the first root's where several have it."""
        found: dict[tuple[EnvironmentKind, str], Path] = {}
        for root in self.roots:
            for kind in PACKAGED_KINDS:
                for path in sorted((root / kind).iterdir()) if (root / kind).is_dir() else ():
                    if path.is_dir() and not path.name.startswith(("_", ".")):
                        found.setdefault((kind, path.name), path)
        return [(kind, path) for (kind, _), path in found.items()]

    def _user_environment(self, name: str) -> Environment:
        path = Path(name).expanduser()
        candidates = (
            [path] if path.is_absolute() else [Path.cwd() / path, *(root / path for root in self.roots)]
        )
        found = next((candidate for candidate in candidates if candidate.exists()), None)
        looks_like_path = os.sep in name or path.suffix in (".yaml", ".yml")
        if not name or found is None or not (looks_like_path or found.is_dir()):
            raise ConfigError(self._unknown(name))
        if found.is_dir():
            environment = self._user_scanner(found.resolve()).directory(found.resolve(), "config")
            if environment is None:
                raise ConfigError(f"no NeMo Gym config in directory {name!r}")
            return environment
        return self._user_scanner(found.resolve()).file(found.resolve())

    def _unknown(self, name: str) -> str:
        known = sorted({path.name for _, path in self._directories() if any(path.rglob("*.yaml"))})
        close = near(name.rpartition("/")[2], known)
        hint = f"near names: {', '.join(close)}" if close else "`gymgate list` shows all"
        return f"no environment {name!r} in nemo-gym {self.version}; {hint}"
