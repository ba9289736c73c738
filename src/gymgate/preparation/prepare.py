"""`prepare`: the rows of an environment or benchmark, fetched, checked and ready to run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from gymgate.catalog import Catalog, EnvConfig, Environment
from gymgate.config import Config, EnvironmentConfig, RuntimeConfig
from gymgate.dataset import open_rows
from gymgate.errors import ConfigError, DataError
from gymgate.preparation import failures
from gymgate.preparation.files import replacing, sha256_of
from gymgate.preparation.manifest import FileNote, Manifest, SourceNote
from gymgate.preparation.program import Event, run_program
from gymgate.preparation.workspace import workspace
from gymgate.runtime import Runtime, ensure_runtime
from gymgate.runtime.environment import clean_env, offline
from gymgate.stack import gym_config
from gymgate.stack.forkserver import parsing

MANIFEST = "manifest.json"
DEFAULT_TOKEN_ENV = "HF_TOKEN"
MAX_BAD_TOLD = 10
Split = Literal["train", "validation", "benchmark", "example"]
Progress = Callable[[str], None]


class PrepareConfig(Config):
    """Which data to prepare, and how."""

    environment: EnvironmentConfig
    """Its config, agent and overrides count, as for a stack."""
    runtime: RuntimeConfig = RuntimeConfig()
    """nemo-gym release whose preparation is run."""
    splits: tuple[Split, ...] = ("train", "validation", "benchmark")
    """Kinds of declared datasets to prepare; each gets a file."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of the dataset's own `prepare()`."""
    script: str | None = None
    """A script of the environment to run in place of what its config declares."""
    script_arguments: tuple[str, ...] = ()
    """Its command line; alone, they are for the only script that the environment has."""
    input: str | None = None
    """A JSONL file of your own in place of what the config declares."""
    prompt: str | None = None
    """Prompt file (YAML: `user`, perhaps `system`) that rows are put to in place of the declared one."""
    requirements: tuple[str, ...] = ()
    """Packages that a script needs and does not declare."""
    token_env: str = DEFAULT_TOKEN_ENV
    """Environment variable with the hub's token, passed on if it is set."""
    env_vars: tuple[str, ...] = ()
    """Names of further environment variables that a script may see."""
    skip_bad: bool = False
    """Leave out rows that cannot run, in place of an error."""
    refresh: bool = False
    """Fetch again what was fetched earlier."""
    timeout_s: float = Field(default=14400.0, gt=0)
    """Seconds for everything, downloads included; making a runtime is not counted."""


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
    `NeedMissingError` for what cannot be fetched (a token, the network, a package) and `SetupError`.
    """
    base = ensure_runtime(config.runtime, progress=progress)
    catalog = Catalog(base.site, base.version)
    environment = catalog.find(config.environment.name)
    chosen = _config_of(environment, config.environment.config)
    runtime = (
        ensure_runtime(config.runtime, config.requirements, progress=progress)
        if config.requirements
        else base
    )
    own = chosen.path if environment.kind == "config" else None
    with workspace(base.version, own, progress, config.timeout_s) as place:
        order = _order(config, environment, chosen, runtime, place)
        needed = tuple({*config.requirements, *catalog.requirements(environment, chosen)})
        try:
            told = _run(config, order, runtime, place, progress, last=len(needed) == len(config.requirements))
        except _LackingError as lacking:
            progress(
                f"{lacking.package} is not in nemo-gym's environment; taking the one of {environment.name}"
            )
            runtime = ensure_runtime(config.runtime, needed, progress=progress)
            order = _order(config, environment, chosen, runtime, place)
            told = _run(config, order, runtime, place, progress, last=True)
        _judge(told, config, environment.name, progress)
        files = {
            path.name: _noted(path, told.sources.get(path.stem, []))
            for path in sorted((place / ".stage").glob("[!.]*.jsonl"))
        }
        manifest = Manifest(
            environment=environment.name,
            config=chosen.name,
            nemo_gym=runtime.version,
            gymgate=metadata.version("gymgate"),
            files=files,
        )
        _publish(place / ".stage", output, manifest)
    return manifest


def _config_of(environment: Environment, name: str | None) -> EnvConfig:
    """The config that was named, else the default, or one that declares data where the default declares none."""
    chosen = environment.config(name)
    if name is None and not _declares(chosen):
        return next((config for config in environment.configs if _declares(config)), chosen)
    return chosen


def _declares(config: EnvConfig) -> bool:
    return any(dataset.type != "example" for dataset in config.datasets)


def _order(
    config: PrepareConfig, environment: Environment, chosen: EnvConfig, runtime: Runtime, place: Path
) -> dict[str, Any]:
    user = environment.kind == "config"
    roots = gym_config.component_roots(chosen.path, (), runtime.site)[:-1] if user else []
    return {
        "forkserver": str(Path(parsing.__file__)),
        "workspace": str(place),
        "stage": str(place / ".stage"),
        "site": str(runtime.site),
        "roots": [str(root) for root in roots],
        "directory": str(_directory(environment, chosen, roots, runtime)),
        "parse": {
            "initial": gym_config.initial_config(runtime.version, place / "results", place / "cache"),
            "overrides": [list(pair) for pair in config.environment.overrides],
            "config_paths": [str(_in(runtime, chosen.path))],
        },
        "types": list(config.splits),
        "type": config.splits[0],
        "arguments": dict(config.arguments),
        "script": config.script,
        "script_arguments": list(config.script_arguments),
        "input": str(Path(config.input).expanduser().absolute()) if config.input else None,
        "prompt": _prompt(config.prompt),
        "agent": config.environment.agent,
        "refresh": config.refresh,
    }


def _in(runtime: Runtime, path: Path) -> Path:
    """A packaged file in another runtime of the same release."""
    parts = path.parts
    if "site-packages" not in parts:
        return path
    there = runtime.site.joinpath(*parts[parts.index("site-packages") + 1 :])
    return there if there.exists() else path


def _directory(environment: Environment, chosen: EnvConfig, roots: Iterable[Path], runtime: Runtime) -> Path:
    """Where an environment's scripts are: a packaged one's directory, or that of a user's resources server."""
    if environment.kind != "config":
        return _in(runtime, environment.path)
    for server in chosen.servers:
        for root in roots:
            if (root / server.kind / server.type).is_dir():
                return root / server.kind / server.type
    return chosen.path.parent


def _prompt(name: str | None) -> str | None:
    """A prompt file of the user's, or one that the release has."""
    return str(Path(name).absolute()) if name and Path(name).is_file() else name


class _LackingError(Exception):
    """A script needs a package that this runtime does not have."""

    def __init__(self, package: str) -> None:
        super().__init__(package)
        self.package = package


def _run(
    config: PrepareConfig,
    order: Mapping[str, Any],
    runtime: Runtime,
    place: Path,
    progress: Progress,
    *,
    last: bool,
) -> _Told:
    environment = _environment(config)
    name, told = config.environment.name, _Told()
    for event in run_program(runtime.python, order, environment, place / "log.txt", config.timeout_s):
        kind = event["event"]
        if kind == "step":
            progress(f"{name}: {event['text'].removeprefix(f'{name}: ')}")
        elif kind == "bad":
            told.bad.append(f"{event['source']}:{event['line']}: {event['reason']}")
        elif kind == "file":
            _count(told, event, progress)
        elif kind == "refused":
            raise failures.refusal(event, name)
        elif kind == "failed":
            if not last and (package := failures.missing_package(event)):
                raise _LackingError(package)
            raise failures.failure(event, name, config.token_env, has_token="HF_TOKEN" in environment)
    return told


def _environment(config: PrepareConfig) -> dict[str, str]:
    """What the program sees of the environment; the hub's cache is the user's own, not one in the release."""
    kept = clean_env(config.env_vars)
    if token := os.environ.get(config.token_env):
        kept["HF_TOKEN"] = token
    elif config.token_env != DEFAULT_TOKEN_ENV:
        raise ConfigError(f"environment variable {config.token_env!r} is not set (--token-var)")
    home = Path(kept.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    kept.setdefault("HF_HOME", str(home))
    kept.setdefault("HF_DATASETS_CACHE", str(Path(kept["HF_HOME"]) / "datasets"))
    kept |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if offline():
        kept |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return kept


def _count(told: _Told, event: Event, progress: Progress) -> None:
    origin = dict(event["origin"])
    if origin.pop("changed", False):
        progress(f"{event['source']}: differs from what was fetched before (sha256 {origin['sha256'][:16]})")
    if event["warning"]:
        progress(f"warning: {event['source']}: {' '.join(event['warning'].split())}")
    note = {key: event[key] for key in ("rows", "bad", "agent", "repeats", "prompt")}
    told.sources.setdefault(event["type"], []).append(SourceNote(name=event["source"], origin=origin, **note))
    told.bad_rows += event["bad"]


def _judge(told: _Told, config: PrepareConfig, name: str, progress: Progress) -> None:
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
        raise DataError(f"{name}: there are no rows")


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
        file.write(manifest.model_dump_json(indent=2).encode() + b"\n")
