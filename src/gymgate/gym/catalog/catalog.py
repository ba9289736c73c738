"""The catalog of an installed nemo-gym."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from gymgate.core.config import EnvironmentConfig
from gymgate.core.errors import ConfigError, near
from gymgate.gym.catalog import shipped
from gymgate.gym.catalog.entries import (
    AGENT_KIND,
    PACKAGED_KINDS,
    Environment,
    EnvironmentKind,
    joined_name,
)
from gymgate.gym.catalog.scan import Scanner, roots_around
from gymgate.gym.inside.resolve import RESOURCES

_KINDS = (*PACKAGED_KINDS, AGENT_KIND)


class Catalog:
    """The environments of a nemo-gym release, read from its files without importing any of it.

    `site` is the directory that holds `nemo_gym` and `resources_servers`, or installs the release and returns that
    directory: it is called when a file is needed. `roots` are searched before it, as Gym does, for a user's own
    environments, servers and configs.
    """

    def __init__(self, site: Path | Callable[[], Path], version: str, roots: Sequence[Path] = ()) -> None:
        self.version = version
        self._site = site
        self._own_roots = tuple(Path(root).absolute() for root in roots)
        self._read: dict[Path, Environment | None] = {}
        self._scanned: list[Environment] | None = None
        self._shipped_scans: dict[Path | None, list[Environment]] = {}
        """By the directory of the release; `None`: it is not installed."""

    @property
    def site(self) -> Path:
        """The directory of the installed packages. The first use may install them."""
        if not isinstance(self._site, Path):
            self._site = self._site()
        return self._site

    @property
    def roots(self) -> tuple[Path, ...]:
        """The directories that are searched, in this order."""
        return (*self._own_roots, self.site)

    @cached_property
    def _scanner(self) -> Scanner:
        return Scanner(self.roots, self.site)

    def environments(self, *, progress: Callable[[str], None] | None = None) -> list[Environment]:
        """Return every packaged environment and those under `roots`, sorted by name, then kind.

        For a supported release this is instant, and nothing is installed. The scan of another one takes a few seconds,
        which `progress` reports.
        """
        if not self._own_roots and (release := self._shipped()) is not None:
            return [item for item in release if item.kind != AGENT_KIND]
        if self._scanned is None:
            if progress is not None:
                progress(f"reading the configs of nemo-gym {self.version}")
            readable = filter(None, (self._at(path, kind) for kind, path in self._directories()))
            self._scanned = sorted(readable, key=lambda item: (item.name, PACKAGED_KINDS.index(item.kind)))
        return list(self._scanned)

    def agents(self) -> list[Environment]:
        """Return the release's agents that ship data, as environments, sorted by name."""
        if (release := self._shipped()) is not None:
            return [item for item in release if item.kind == AGENT_KIND and _ships_data(item)]
        candidates = (self._at(path, AGENT_KIND) for path in sorted((self.site / AGENT_KIND).glob("*/")))
        return [agent for agent in candidates if agent is not None and _ships_data(agent)]

    def _shipped(self) -> list[Environment] | None:
        """Return the shipped scan of this release; `None` for a checkout, whose files may change at any time."""
        if not shipped.has_scan(self.version):
            return None
        site = self._site if isinstance(self._site, Path) else None
        metadata = f"nemo_gym-{self.version}.dist-info"
        if site is not None and not ((site / metadata).is_dir() and (site / RESOURCES).is_dir()):
            return None
        if site not in self._shipped_scans:
            self._shipped_scans[site] = shipped.load(self.version, site)
        return self._shipped_scans[site]

    def find(self, name: str, configs: str | Sequence[str] | None = None) -> Environment:
        """Return the environment of that name, with one more config if `configs` are several or name files.

        `Environment.config(configs)` returns that config. Raises `ConfigError` for what there is not, for an unknown name
        before anything is installed.
        """
        # The name is judged first: whatever follows reads the release's files, and so may install them.
        self.refuse_unknown(name)
        environment = self._environment(name)
        names = (configs,) if isinstance(configs, str) else tuple(configs or ())
        # The environment's own configs come before files of that name; one of them alone is there already.
        paths = [self._config_file(environment, config_name) for config_name in names]
        if not names or (len(names) == 1 and any(config.path == paths[0] for config in environment.configs)):
            return environment
        around = dict.fromkeys(root for path in paths for root in roots_around(path, _KINDS))
        config = self._user_scanner(*around).combined(joined_name(names), paths)
        return replace(environment, configs=(*environment.configs, config))

    def environments_of(self, configs: Iterable[EnvironmentConfig]) -> dict[str, Environment]:
        """Return the environments of a stack, in order, by the name that its rows, rollouts and runs know each by.

        It is the bare name, after its kind if the bare one means another environment, whatever else the stack holds.
        Raises as `find`, and `ConfigError` for two of one name.
        """
        environments: dict[str, Environment] = {}
        paths: dict[str, str] = {}
        for config in configs:
            environment = self.find(config.name, config.config)
            name = self._name(environment)
            if name in environments:
                raise ConfigError(
                    f"{paths[name]!r} and {config.name!r} are both the environment {name!r}: run each by itself, or rename one's "
                    "directory"
                )
            environments[name], paths[name] = environment, config.name
        return environments

    def _name(self, environment: Environment) -> str:
        if environment.kind == "config":
            return environment.name
        bare = environment.kind != AGENT_KIND and self._environment(environment.name).path == environment.path
        return environment.name if bare else environment.known_as

    def look_up(self, name: str, configs: Sequence[str] = ()) -> Environment:
        """Return the environment as `find` does, to read about it. What ships with gymgate need not be installed."""
        self.refuse_unknown(name)
        # A user's own environment may have the name of a packaged one, and an installed release tells what data is there.
        environment = None if self._is_here or self._own_roots else self._in_scan(name)
        names = {config.name for config in environment.configs} if environment is not None else set()
        if environment is not None and len(configs) <= 1 and {*configs} <= names:
            return environment
        return self.find(name, configs)

    def refuse_unknown(self, name: str) -> None:
        """Raise `ConfigError` for a name that a release which is not installed does not have, and that is no path."""
        kinds, bare = _kinds_of(name)
        path = Path(name).expanduser()
        if self._is_here or "/" in bare or bare.startswith(".") or path.suffix in (".yaml", ".yml"):
            return
        own = (root / kind / bare for root in self._own_roots for kind in kinds)
        paths = (base / path for base in (Path.cwd(), *self._own_roots))
        if self._in_scan(name) is None and not any(candidate.exists() for candidate in (*own, *paths)):
            raise ConfigError(self._unknown(name))

    @property
    def _is_here(self) -> bool:
        """Whether only the release's files can tell what it has: it is installed, or its scan does not ship."""
        return isinstance(self._site, Path) or not shipped.has_scan(self.version)

    def _in_scan(self, name: str) -> Environment | None:
        kinds, bare = _kinds_of(name)
        release = {(item.kind, item.name): item for item in self._shipped() or ()}
        return next((release[kind, bare] for kind in kinds if (kind, bare) in release), None)

    def _config_file(self, environment: Environment, name: str) -> Path:
        """Return the file of one of an environment's configs, else the file at that path."""
        for config in environment.configs:
            if name.removesuffix(".yaml") in (config.name, config.path.stem):
                return config.path
        bases = (Path.cwd(), *self.roots)
        candidates = (base / Path(name).expanduser() for base in bases)
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            choices = ", ".join(config.name for config in environment.configs)
            raise ConfigError(
                f"environment {environment.name!r} has no config {name!r}, and there is no such file in {Path.cwd()} or in "
                f"nemo-gym {self.version}; its configs: {choices or 'none'}"
            )
        return path.resolve()

    def _environment(self, name: str) -> Environment:
        """Return the environment called `mcqa` or `environments/mcqa`, or the one in a user's config file, its directory or
        the repository around it.

        A bare name is looked up among resources servers, then environments, then benchmarks. An agent that ships data is
        `responses_api_agents/NAME`. Raises `ConfigError` with near names.
        """
        kinds, bare = _kinds_of(name)
        # Packaged names come before paths: a directory `mcqa` in the working directory is `./mcqa`. Kinds come before roots:
        # a resources server of the release before a user's own benchmark of that name.
        if bare and "/" not in bare and not bare.startswith("."):
            for kind in kinds:
                for root in self.roots:
                    if environment := self._at(root / kind / bare, kind):
                        return environment
        return self._user_environment(name)

    def _at(self, path: Path, kind: EnvironmentKind) -> Environment | None:
        """Return the environment in a directory. A release's own is that of the shipped scan, with the data that is there now."""
        if path not in self._read:
            release = self._shipped() if path.parent.parent == self.site else None
            item = next((item for item in release or () if item.path == path), None)
            if not path.is_dir():
                self._read[path] = None
            elif item is not None:
                self._read[path] = replace(item, data=self._scanner.data(path, kind, item.configs))
            else:
                self._read[path] = self._scanner.directory(path, kind)
        return self._read[path]

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
        # The working directory comes first, as for any command's paths; then what NeMo Gym itself would search.
        candidates = (base / path for base in (Path.cwd(), *self.roots))
        location = next((candidate for candidate in candidates if candidate.exists()), None)
        looks_like_path = os.sep in name or path.suffix in (".yaml", ".yml")
        if location is None and path.suffix in (".yaml", ".yml"):
            raise ConfigError(
                f"there is no config file {name!r} in {Path.cwd()} or in nemo-gym {self.version}"
            )
        if not name or location is None or not (looks_like_path or location.is_dir()):
            raise ConfigError(self._unknown(name))
        location = location.resolve()
        # Its config may name files below the working directory or in the tree around it.
        around = roots_around(location, _KINDS)
        scanner = self._user_scanner(*around)
        if not location.is_dir():
            return scanner.file(location)
        if (environment := scanner.directory(location, "config")) is not None:
            return environment
        below = sorted(path for path in (location / RESOURCES).glob("[!_.]*/") if (path / "configs").is_dir())
        if len(below) > 1:
            paths = ", ".join(f"{name.rstrip('/')}/{path.relative_to(location)}" for path in below)
            raise ConfigError(f"directory {name!r} has several environments; choose one of: {paths}")
        if not below:
            raise ConfigError(f"no NeMo Gym config in directory {name!r}")
        return self._user_environment(str(below[0]))

    def _user_scanner(self, *around: Path) -> Scanner:
        """Return a scanner that also finds files in the trees around a user's config and below the working directory."""
        return Scanner((*self.roots[:-1], *around, Path.cwd(), self.site), self.site)

    def _unknown(self, name: str) -> str:
        if self._is_here:
            packaged = sorted({path.name for _, path in self._directories() if any(path.rglob("*.yaml"))})
        else:
            packaged = sorted({item.name for item in self._shipped() or () if item.kind != AGENT_KIND})
        beside = Path(name).expanduser().parent.glob("[!_.]*/")
        own = [path.name for path in beside if (path / RESOURCES).is_dir() or (path / "configs").is_dir()]
        close = near(name.strip("/").rpartition("/")[2], [*own, *packaged])
        hint = f"near names: {', '.join(close)}" if close else "`gymgate list` shows all"
        return f"no environment {name!r} in nemo-gym {self.version}; {hint}"


def _kinds_of(name: str) -> tuple[tuple[EnvironmentKind, ...], str]:
    """Return the kinds among which a name is looked up, and the name without its kind."""
    bare = name.strip("/")
    for kind in _KINDS:
        if bare.startswith(kind + "/"):
            return (kind,), bare.removeprefix(kind + "/")
    return PACKAGED_KINDS, bare


def _ships_data(agent: Environment) -> bool:
    return any(file.path.is_relative_to(agent.path / "data") for file in agent.data)
