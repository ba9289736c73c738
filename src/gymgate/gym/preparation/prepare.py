"""`prepare_data`: the rows of an environment or benchmark, fetched, checked and ready to run."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from gymgate.core.errors import ConfigError, DataError, SetupError
from gymgate.core.files import open_regular, read_whole, replacing, sha256_of
from gymgate.gym.catalog import Catalog, EnvConfig, Environment
from gymgate.gym.catalog.entries import PACKAGED_KINDS
from gymgate.gym.preparation import diagnosis
from gymgate.gym.preparation.manifest import FileNote, Manifest, PrepareConfig, SourceNote
from gymgate.gym.preparation.order import STAGE, order_for, program_env
from gymgate.gym.preparation.program import Event, run_program, workspace
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import Runtime, ensure_runtime, find_runtime, open_catalog
from gymgate.gym.runtime.command import Progress

MANIFEST = "manifest.json"
MAX_BAD_SHOWN = 10
LOG = "log.txt"


class ScriptHelp(Exception):
    """A script was asked for its help (`--help` among its arguments), which is the message; nothing was prepared."""


def prepare_data(config: PrepareConfig, output: Path, *, progress: Progress = lambda _: None) -> Manifest:
    """Write `train.jsonl`, `validation.jsonl` or `benchmark.jsonl`, and `manifest.json`, into `output`.

    Each file appears when all of them are complete. A second call fetches nothing, and needs no network. Raises
    `ConfigError` for what the environment does not have and for a directory with another's rows, `DataError` for rows
    that cannot run, `NeedMissingError` for what cannot be fetched (a token, the network, a package) and `SetupError`;
    `ScriptHelp` if a script's arguments ask for its help.
    """
    name = config.environment.name
    catalog = open_catalog(config.runtime, progress=progress)
    catalog.refuse_unknown(name)
    base = ensure_runtime(config.runtime, progress=progress)
    environment = _environment_of(catalog, config, progress)
    chosen = _config_of(environment, config.environment.config)
    requirements = chosen.requirements
    own = chosen.path if environment.kind == "config" else None
    _refuse_other(output, environment, catalog)
    release = base.site if config.runtime.interpreter is not None else None
    with workspace(base.version, own, release, progress, config.timeout_s) as directory:
        preparation = _Preparation(config, environment, chosen, directory, progress)
        runtime = _runtime(config, base, requirements, progress)
        try:
            if needed := preparation.run(runtime, requirements):
                runtime = _runtime_with(config, needed, progress)
                if needed := preparation.run(runtime):
                    raise SetupError(f"{name}: {', '.join(needed)} cannot be found although it was installed")
        except ConfigError as error:
            others = [namesake.known_as for namesake in _namesakes(catalog, environment, name)]
            raise ConfigError(f"{error}; or prepare {' or '.join(others)}") if others else error from None
        preparation.refuse_bad_rows()
        manifest = Manifest(
            environment=name if environment.kind == "config" else environment.known_as,
            config=chosen.name,
            nemo_gym=runtime.version,
            gymgate=metadata.version("gymgate"),
            files=preparation.files(),
        )
        _publish(directory / STAGE, output, manifest)
    return manifest


def _refuse_other(output: Path, environment: Environment, catalog: Catalog) -> None:
    """Raise `ConfigError` for a directory with another environment's rows. A path that leads nowhere may be this one's."""
    earlier, there = _earlier(output), None
    with contextlib.suppress(ConfigError):
        there = None if earlier is None else catalog.find(earlier.environment).known_as
    if there not in (None, environment.known_as):
        raise ConfigError(f"{output} holds rows of {there}, not of {environment.known_as}: choose another -o")


def _environment_of(catalog: Catalog, config: PrepareConfig, progress: Progress) -> Environment:
    """The environment of that name; of several that share it, the first that declares data."""
    name = config.environment.name
    environment = catalog.find(name, config.environment.config)
    own = config.input or config.script or config.script_arguments
    if own or any(_declares_data(item) for item in environment.configs):
        return environment
    for other in _namesakes(catalog, environment, name):
        progress(f"{name}: its resources server declares no data; taking {other.known_as}")
        return other
    return environment


def _namesakes(catalog: Catalog, environment: Environment, name: str) -> Iterator[Environment]:
    """Others of that name which declare data; none for a name with its kind, or a path."""
    for kind in PACKAGED_KINDS if environment.kind != "config" and "/" not in name else ():
        with contextlib.suppress(ConfigError):
            other = catalog.find(f"{kind}/{name}")
            if kind != environment.kind and any(_declares_data(item) for item in other.configs):
                yield other


def _config_of(environment: Environment, name: str | Sequence[str] | None) -> EnvConfig:
    """The config that was named; else the default one, or the first with data if the default declares none."""
    default = environment.config(name)
    if name is not None or _declares_data(default):
        return default
    return next((config for config in environment.configs if _declares_data(config)), default)


def _declares_data(config: EnvConfig) -> bool:
    return any(dataset.type != "example" for dataset in config.datasets)


def _runtime(
    config: PrepareConfig, base: Runtime, requirements: Sequence[str], progress: Progress
) -> Runtime:
    """With the packages that were asked for; else the environment's own runtime, if it is there already; else the
    bare release, which is enough for most preparations."""
    if config.requirements:
        return ensure_runtime(config.runtime, config.requirements, progress=progress)
    return (find_runtime(config.runtime, requirements) if requirements else None) or base


def _runtime_with(config: PrepareConfig, requirements: Sequence[str], progress: Progress) -> Runtime:
    name, needed = config.environment.name, sorted({*config.requirements, *requirements})
    progress(f"{name}: its data needs {', '.join(needed)}")
    try:
        return ensure_runtime(config.runtime, needed, progress=progress)
    except SetupError as error:
        problem = "not all packages that its data needs can be installed; --with PACKAGE adds single ones"
        raise SetupError(f"{name}: {problem}: {error}") from error


@dataclass
class _Preparation:
    """One preparation in a workspace: runs the program and keeps what it reports."""

    config: PrepareConfig
    environment: Environment
    chosen: EnvConfig
    directory: Path
    progress: Progress
    sources: dict[str, list[SourceNote]] = field(default_factory=dict)
    """By the file, without its suffix, that their rows went into."""
    bad: list[str] = field(default_factory=list)
    bad_rows: int = 0
    """All of them; `bad` has the first ones."""

    @property
    def name(self) -> str:
        return self.config.environment.name

    def run(self, runtime: Runtime, spare: Sequence[str] = ()) -> Sequence[str]:
        """Run the program. Returns the packages to install before it is run again: those that a script declares, or
        `spare` after an import failed; empty if it has done everything."""
        self.sources, self.bad, self.bad_rows = {}, [], 0
        order = order_for(self.config, self.environment, self.chosen, runtime, self.directory)
        variables, log = program_env(self.config), self.directory / LOG
        for event in run_program(runtime.python, order, variables, log, self.config.timeout_s):
            kind = event["event"]
            if kind == "step":
                self.progress(f"{self.name}: {event['text'].removeprefix(f'{self.name}: ')}")
            elif kind == "bad":
                more = f" ({event['rows']} rows)" if event["rows"] > 1 else ""
                self.bad.append(f"{event['source']}:{event['line']}: {event['reason']}{more}")
            elif kind == "file":
                self._note(event)
            elif kind == "help":
                raise ScriptHelp(event["text"])
            elif kind == "lacks":
                return list(event["requirements"])
            elif kind == "refused":
                raise diagnosis.refusal(event, self.name)
            elif kind == "failed":
                if spare and diagnosis.missing_package(event):
                    return spare
                token = self.config.token_env
                raise diagnosis.failure(event, self.name, token, log, has_token="HF_TOKEN" in variables)
        return ()

    def _note(self, event: Event) -> None:
        name, origin = event["source"], dict(event["origin"])
        if origin.pop("changed", False):
            self.progress(f"{name}: differs from what was fetched before (sha256 {origin['sha256'][:16]})")
        if event["warning"]:
            self.progress(f"warning: {name}: {' '.join(event['warning'].split())}")
        fields = {key: event[key] for key in ("rows", "bad", "agent", "repeats", "prompt")}
        self.sources.setdefault(event["type"], []).append(SourceNote(name=name, origin=origin, **fields))
        self.bad_rows += event["bad"]

    def refuse_bad_rows(self) -> None:
        """Report bad rows. Raises `DataError` for them unless they may be left out, and if no row is left."""
        fails = self.bad_rows and not self.config.skip_bad
        for line in self.bad[1 if fails else 0 : MAX_BAD_SHOWN]:
            self.progress(f"bad row: {line}")
        if fails:
            raise DataError(
                f"{self.name}: {self.bad_rows} rows cannot run, the first: {self.bad[0]}; --skip-bad leaves such rows out"
            )
        if self.bad_rows:
            self.progress(f"{self.bad_rows} bad rows left out")
        if not any(note.rows for notes in self.sources.values() for note in notes):
            raise DataError(
                f"{self.name}: there are no rows; the preparation's output is in {self.directory / LOG}"
            )

    def files(self) -> dict[str, FileNote]:
        """Each staged file by name, read as every command will read it. Raises `DataError` for an unreadable row."""
        staged = sorted((self.directory / STAGE).glob("[!.]*.jsonl"))
        files = {path.name: _file_note(path, self.sources.get(path.stem, [])) for path in staged}
        for first, second in itertools.combinations(files, 2):
            if files[first].sha256 == files[second].sha256:
                self.progress(f"warning: {first} and {second} hold the same rows")
        return files


def _file_note(path: Path, sources: Iterable[SourceNote]) -> FileNote:
    keys: set[str] = set()
    agents: Counter[str] = Counter()
    for row in open_rows(str(path), environment=None):
        keys.add(row.key)
        agents[row.agent or ""] += 1
    return FileNote(
        rows=agents.total(),
        distinct=len(keys),
        agents=dict(sorted(agents.items())),
        sha256=sha256_of(path),
        sources=tuple(sources),
    )


def _publish(stage: Path, output: Path, manifest: Manifest) -> None:
    for name in manifest.files:
        with replacing(output / name) as file, (stage / name).open("rb") as staged:
            shutil.copyfileobj(staged, file)
    # Last: whoever reads it finds the files that it lists.
    with replacing(output / MANIFEST) as file:
        file.write(_with_earlier(output, manifest).model_dump_json(indent=2).encode() + b"\n")


def _earlier(output: Path) -> Manifest | None:
    """The manifest that is there already, if one can be read."""
    try:
        with open_regular(output / MANIFEST) as file:
            return Manifest.model_validate_json(read_whole(file))
    except (OSError, ValueError):
        return None


def _with_earlier(output: Path, manifest: Manifest) -> Manifest:
    """With the other files of the same environment and release that the manifest already there lists."""
    earlier = _earlier(output)
    if earlier is None or (earlier.environment, earlier.nemo_gym) != (
        manifest.environment,
        manifest.nemo_gym,
    ):
        return manifest
    files = {name: note for name, note in earlier.files.items() if (output / name).is_file()}
    return manifest.model_copy(update={"files": dict(sorted({**files, **manifest.files}.items()))})
