"""`prepare`: the rows of an environment or benchmark, fetched, checked and ready to run."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path

from gymgate.catalog import Catalog, EnvConfig, Environment
from gymgate.catalog.model import PACKAGED_KINDS
from gymgate.dataset import open_rows
from gymgate.errors import ConfigError, DataError, SetupError
from gymgate.files import replacing, sha256_of
from gymgate.preparation import failures
from gymgate.preparation.manifest import FileNote, Manifest, SourceNote
from gymgate.preparation.order import STAGE, PrepareConfig, order_for, program_env
from gymgate.preparation.program import Event, run_program
from gymgate.preparation.workspace import workspace
from gymgate.runtime import Runtime, ensure_runtime, find_runtime

MANIFEST = "manifest.json"
MAX_BAD_TOLD = 10
LOG = "log.txt"
Progress = Callable[[str], None]


@dataclass
class _Told:
    """What the program told, sources by the file they went into."""

    sources: dict[str, list[SourceNote]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    bad_rows: int = 0


def prepare(config: PrepareConfig, output: Path, *, progress: Progress = lambda _: None) -> Manifest:
    """Write `train.jsonl`, `validation.jsonl` or `benchmark.jsonl`, and `manifest.json`, into `output`.

    Each file appears when all of them are complete. A second call fetches nothing, and needs no network. Raises
    `ConfigError` for what the environment does not have, `DataError` for rows that cannot run,
    `NeedMissingError` for what cannot be fetched (a token, the network, a package) and `SetupError`; `ScriptHelp` if a script's
    arguments ask for its help.
    """
    base = ensure_runtime(config.runtime, progress=progress)
    catalog = Catalog(base.site, base.version)
    environment = _environment_of(catalog, config, progress)
    chosen = _config_of(environment, config.environment.config)
    every = chosen.requirements
    runtime = _runtime(config, base, every, progress)
    own = chosen.path if environment.kind == "config" else None
    with workspace(base.version, own, progress, config.timeout_s) as place:
        run = partial(_run, config, environment, chosen, place, progress)
        try:
            told = run(runtime, every)
        except ConfigError as error:
            others = [each.known_as for each in _namesakes(catalog, environment, config.environment.name)]
            raise ConfigError(f"{error}; or prepare {' or '.join(others)}") if others else error from None
        except _LackingError as lacking:
            told = run(_runtime_with(config, lacking.requirements or every, environment.name, progress), ())
        _judge(told, config, environment.name, place / LOG, progress)
        manifest = Manifest(
            environment=_full_name(environment, config),
            config=chosen.name,
            nemo_gym=runtime.version,
            gymgate=metadata.version("gymgate"),
            files=_files(place / STAGE, told, progress),
        )
        _publish(place / STAGE, output, manifest)
    return manifest


def _runtime_with(
    config: PrepareConfig, requirements: Sequence[str], name: str, progress: Progress
) -> Runtime:
    needed = sorted({*config.requirements, *requirements})
    progress(f"{name}: its data needs {', '.join(needed)}")
    try:
        return ensure_runtime(config.runtime, needed, progress=progress)
    except SetupError as error:
        raise SetupError(
            f"{name}: its data needs packages of which not all can be installed; --with PACKAGE adds single ones: {error}"
        ) from error


def _runtime(config: PrepareConfig, base: Runtime, every: Sequence[str], progress: Progress) -> Runtime:
    """What was asked for; else the environment's own, if it is there already; else the bare release, which most
    preparations need no more than."""
    if config.requirements:
        return ensure_runtime(config.runtime, config.requirements, progress=progress)
    return (find_runtime(config.runtime, every) if every else None) or base


def _environment_of(catalog: Catalog, config: PrepareConfig, progress: Progress) -> Environment:
    """The environment of that name; of several that share it, the first that declares data."""
    name = config.environment.name
    found = catalog.find(name)
    own = config.input or config.script or config.script_arguments
    if own or any(_declares(each) for each in found.configs):
        return found
    for other in _namesakes(catalog, found, name):
        progress(f"{name}: its resources server declares no data; taking {other.known_as}")
        return other
    return found


def _namesakes(catalog: Catalog, found: Environment, name: str) -> Iterator[Environment]:
    """Others of that name which declare data; a name with its kind, or a path, means one only."""
    for kind in PACKAGED_KINDS if found.kind != "config" and "/" not in name else ():
        with contextlib.suppress(ConfigError):
            other = catalog.find(f"{kind}/{name}")
            if kind != found.kind and any(_declares(each) for each in other.configs):
                yield other


def _config_of(environment: Environment, name: str | None) -> EnvConfig:
    """The config that was named, else the default, or one that declares data where the default declares none."""
    chosen = environment.config(name)
    if name is None and not _declares(chosen):
        return next((config for config in environment.configs if _declares(config)), chosen)
    return chosen


def _full_name(environment: Environment, config: PrepareConfig) -> str:
    """By which every command finds it."""
    return config.environment.name if environment.kind == "config" else environment.known_as


def _declares(config: EnvConfig) -> bool:
    return any(dataset.type != "example" for dataset in config.datasets)


class ScriptHelp(Exception):
    """A script was asked for its help (`--help` among its arguments), which this is; nothing was prepared."""


class _LackingError(Exception):
    """A script needs packages that this runtime does not have: those that it declares, or the environment's."""

    def __init__(self, requirements: Sequence[str] = ()) -> None:
        super().__init__(*requirements)
        self.requirements = requirements


def _run(
    config: PrepareConfig,
    found: Environment,
    chosen: EnvConfig,
    place: Path,
    progress: Progress,
    runtime: Runtime,
    more: Sequence[str],
) -> _Told:
    """Run the program; `_LackingError` where `more` requirements, or those that a script declares, may help."""
    order = order_for(config, found, chosen, runtime, place)
    environment = program_env(config)
    name, told = config.environment.name, _Told()
    log = place / LOG
    for event in run_program(runtime.python, order, environment, log, config.timeout_s):
        kind = event["event"]
        if kind == "step":
            progress(f"{name}: {event['text'].removeprefix(f'{name}: ')}")
        elif kind == "bad":
            told.bad.append(f"{event['source']}:{event['line']}: {event['reason']}")
        elif kind == "file":
            _count(told, event, progress)
        elif kind == "help":
            raise ScriptHelp(event["text"])
        elif kind == "lacks":
            raise _LackingError(event["requirements"])
        elif kind == "refused":
            raise failures.refusal(event, name)
        elif kind == "failed":
            if more and failures.missing_package(event):
                raise _LackingError
            raise failures.failure(event, name, config.token_env, log, has_token="HF_TOKEN" in environment)
    return told


def _count(told: _Told, event: Event, progress: Progress) -> None:
    origin = dict(event["origin"])
    if origin.pop("changed", False):
        progress(f"{event['source']}: differs from what was fetched before (sha256 {origin['sha256'][:16]})")
    if event["warning"]:
        progress(f"warning: {event['source']}: {' '.join(event['warning'].split())}")
    note = {key: event[key] for key in ("rows", "bad", "agent", "repeats", "prompt")}
    told.sources.setdefault(event["type"], []).append(SourceNote(name=event["source"], origin=origin, **note))
    told.bad_rows += event["bad"]


def _judge(told: _Told, config: PrepareConfig, name: str, log: Path, progress: Progress) -> None:
    """Name bad rows; raise for them unless they are to be left out, and where nothing is left."""
    for line in told.bad[:MAX_BAD_TOLD]:
        progress(f"bad row: {line}")
    if told.bad_rows and not config.skip_bad:
        raise DataError(
            f"{name}: {told.bad_rows} rows cannot run, the first: {told.bad[0]}; leave them out with --skip-bad"
        )
    if told.bad_rows:
        progress(f"{told.bad_rows} bad rows left out")
    if not any(note.rows for notes in told.sources.values() for note in notes):
        raise DataError(f"{name}: there are no rows; what the preparation said is in {log}")


def _files(stage: Path, told: _Told, progress: Progress) -> dict[str, FileNote]:
    """What is in each staged file, by name; files that turn out the same are told."""
    files = {
        path.name: _noted(path, told.sources.get(path.stem, [])) for path in sorted(stage.glob("[!.]*.jsonl"))
    }
    for first, second in itertools.combinations(files, 2):
        if files[first].sha256 == files[second].sha256:
            progress(f"warning: {first} and {second} hold the same rows")
    return files


def _noted(path: Path, sources: Iterable[SourceNote]) -> FileNote:
    """Read a file as everything that runs it will. Raises `DataError` for a row that could not be read."""
    keys: set[str] = set()
    agents: Counter[str] = Counter()
    rows = open_rows(str(path), environment=None)
    for row in rows:
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
            while chunk := staged.read(1 << 20):
                file.write(chunk)
    with replacing(output / MANIFEST) as file:
        file.write(_with_earlier(output, manifest).model_dump_json(indent=2).encode() + b"\n")


def _with_earlier(output: Path, manifest: Manifest) -> Manifest:
    """Together with what the manifest that is there says of other files of the same environment and release."""
    try:
        earlier = Manifest.model_validate_json((output / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return manifest
    if (earlier.environment, earlier.nemo_gym) != (manifest.environment, manifest.nemo_gym):
        return manifest
    kept = {name: note for name, note in earlier.files.items() if (output / name).is_file()}
    return manifest.model_copy(update={"files": dict(sorted({**kept, **manifest.files}.items()))})
