"""`ensure_runtime`: the runtime for a release and a set of requirements, made if it is not there."""

from __future__ import annotations

import hashlib
import logging
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gymgate.config import DEFAULT_NEMO_GYM, RuntimeConfig, cache_dir
from gymgate.errors import ConfigError, SetupError
from gymgate.runtime.environment import offline
from gymgate.runtime.held import hold
from gymgate.runtime.install import (
    Recipe,
    UnusableInterpreterError,
    inspect_interpreter,
    make_environment,
)
from gymgate.runtime.installer import UvFailedError, find_uv
from gymgate.runtime.interpreters import Interpreter, NotUsableError, choose, is_named, probe, text
from gymgate.runtime.lockfile import floor_of, read_lock
from gymgate.runtime.venv import MARKER, build_once, facts_of, no_space, writing

logger = logging.getLogger(__name__)
Progress = Callable[[str], None]
_ADDRESS = re.compile(r"https?://[^\s@#]+")
"""Of a requirement that is not on an index, without the revision."""


@dataclass(frozen=True)
class Runtime:
    """An interpreter with nemo-gym installed."""

    python: Path
    site: Path
    """Directory of the installed packages, NeMo Gym's servers among them."""
    version: str
    """Of nemo-gym."""
    requirements: tuple[str, ...] = ()
    """What was installed beside it."""


def find_runtime(config: RuntimeConfig, requirements: Iterable[str] = ()) -> Runtime | None:
    """The runtime if it is there; never makes one. Reads one small file, unless `config.interpreter` is set.

    `gymgate cache clean` leaves it alone while this process lives.
    """
    recipe = _recipe(config, requirements)
    if config.interpreter is not None:
        return _given(config.interpreter, recipe.requirements)
    places = runtimes_dir().glob(f"nemo-gym-{recipe.version}-py*-{recipe.digest}")
    for place in sorted(places, key=_newest_python, reverse=True):
        facts = facts_of(place)
        if facts is None:
            continue
        if config.python is not None and not is_named(facts.interpreter, facts.python, config.python):
            continue
        if hold(place / MARKER):
            version = facts.nemo_gym or recipe.version
            return Runtime(place / "bin" / "python", facts.site, version, recipe.requirements)
    return None


def ensure_runtime(
    config: RuntimeConfig, requirements: Iterable[str] = (), *, progress: Progress | None = None
) -> Runtime:
    """The runtime for `config` with `requirements` (PyPI requirement strings) installed; made on first use.

    Blocks: about 15 s with a warm uv cache, a minute or more without. Instant, and offline, once made. Any number of
    processes may call it at once; `gymgate cache clean` leaves it alone while one of them lives. `progress` gets a line
    per step; those that start with `warning: ` go to the log without it. Raises `SetupError`.
    """
    recipe = _recipe(config, requirements)
    if (found := find_runtime(config, recipe.requirements)) is not None:
        return found
    find_uv()
    with writing(runtimes_dir()):
        pass
    say = progress or _log
    failures: list[str] = []
    for interpreter in _interpreters(config, recipe, say):
        try:
            place = _build(config, recipe, interpreter, say)
        except UnusableInterpreterError as error:
            failures.append(str(error))
            say(f"warning: {error}")
            continue
        facts = facts_of(place)
        assert facts is not None
        version = facts.nemo_gym or recipe.version
        return Runtime(place / "bin" / "python", facts.site, version, recipe.requirements)
    raise SetupError(f"no interpreter here can run nemo-gym {config.version}: {'; '.join(failures)}")


def _interpreters(config: RuntimeConfig, recipe: Recipe, say: Progress) -> Iterator[Interpreter]:
    """Those to try: the one that the bare release is installed for, then all by preference; told if below the floor."""
    known = _known_interpreter(config) if recipe.requirements else None
    if known is not None:
        yield known
    told = known is not None
    for interpreter in choose(config.python, recipe.floor, say):
        if interpreter == known:
            continue
        if interpreter.version < recipe.floor and not told:
            told = True
            say(
                f"warning: nemo-gym {config.version} declares Python >= {text(recipe.floor)}, which is not here; "
                f"using {interpreter}"
            )
        yield interpreter


def _known_interpreter(config: RuntimeConfig) -> Interpreter | None:
    base = find_runtime(config)
    facts = facts_of(base.python.parents[1]) if base is not None else None
    if facts is None:
        return None
    try:
        return probe(facts.interpreter)
    except NotUsableError:
        return None


def runtimes_dir() -> Path:
    """Where the environments are."""
    return cache_dir() / "runtimes"


def _build(config: RuntimeConfig, recipe: Recipe, interpreter: Interpreter, say: Progress) -> Path:
    root = runtimes_dir()
    base = find_runtime(config) if recipe.requirements else None
    make = partial(make_environment, recipe, interpreter, base.site if base else None, say)
    try:
        return build_once(root, recipe.name(interpreter), make, say)
    except UvFailedError as error:
        if error.kind == "disk":
            raise no_space(root) from error
        raise SetupError(
            f"cannot set up nemo-gym {recipe.version}: {what_failed(error, recipe.requirements)}"
        ) from error


def what_failed(error: UvFailedError, requirements: Sequence[str]) -> str:
    """On one line, with what to do; names the requirement that is fetched from elsewhere than an index, if it is one."""
    if offline() and error.kind in ("network", "conflict"):
        return f"the network is off (GYMGATE_OFFLINE or UV_OFFLINE) and uv's cache lacks a package: {error}"
    if error.kind != "network":
        return str(error)
    for requirement in requirements:
        if (address := _ADDRESS.search(requirement)) is not None and address[0] in error.output:
            return f"cannot fetch {requirement}, which is on no package index: {error}"
    return (
        f"cannot reach the package index: {error}; check the network, HTTPS_PROXY, and the index that is configured "
        f"(UV_DEFAULT_INDEX, UV_INDEX, PIP_INDEX_URL, pip.conf)"
    )


def _log(line: str) -> None:
    level = logging.WARNING if line.startswith("warning: ") else logging.INFO
    logger.log(level, "%s", line.removeprefix("warning: "))


def _newest_python(place: Path) -> list[int]:
    label = place.name.rpartition("-py")[2].partition("-")[0]
    return [int(part) for part in label.split(".") if part.isdigit()]


def _recipe(config: RuntimeConfig, requirements: Iterable[str]) -> Recipe:
    if not re.fullmatch(r"\d+(\.\d+)*([.-]?[a-z]+\d*)*(\+[a-z0-9.]+)?", config.version):
        raise ConfigError(
            f"nemo-gym release {config.version!r} is no version; write one such as {DEFAULT_NEMO_GYM}"
        )
    lock = read_lock(config.version)
    wanted = tuple(sorted({requirement.strip() for requirement in requirements}))
    for requirement in wanted:
        if not requirement or requirement.startswith("-") or "\n" in requirement:
            raise ConfigError(f"requirement {requirement!r} is not one that a package index can meet")
    identity = "\n".join([lock or config.version, *wanted, platform.machine(), platform.system()])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return Recipe(config.version, floor_of(config.version), lock, wanted, digest)


def _given(interpreter: str, requirements: tuple[str, ...]) -> Runtime:
    python = Path(interpreter).expanduser()
    hold(python.absolute().parents[1] / MARKER)  # it may be one of ours
    site, release, _ = inspect_interpreter(python)
    if site is None or release is None:
        raise SetupError(f"interpreter {interpreter!r} has no nemo-gym installed")
    return Runtime(python, site, release, requirements)
