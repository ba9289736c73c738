"""`ensure_runtime`: the runtime for a release and a set of requirements, made if it is not there."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion
from packaging.version import Version as Release

from gymgate.core.config import DEFAULT_NEMO_GYM, RuntimeConfig, cache_dir
from gymgate.core.errors import ConfigError, SetupError
from gymgate.gym.catalog import Catalog
from gymgate.gym.catalog.shipped import has_scan
from gymgate.gym.runtime.command import Progress
from gymgate.gym.runtime.install import Installation, Recipe, UnusableInterpreterError
from gymgate.gym.runtime.interpreters import Interpreter, choose, is_named, text
from gymgate.gym.runtime.lockfile import PYTHON_FLOOR, read_lock
from gymgate.gym.runtime.locks import hold
from gymgate.gym.runtime.uv import UvFailedError, find_uv
from gymgate.gym.runtime.variables import offline
from gymgate.gym.runtime.venv import (
    MARKER,
    Runtime,
    build_once,
    inspect_runtime,
    no_space,
    read_runtime,
    writing,
)

logger = logging.getLogger(__name__)
_ADDRESS = re.compile(r"https?://[^\s@#]+")
"""The URL of a requirement that is not on an index, without the revision."""


def find_runtime(config: RuntimeConfig, requirements: Iterable[str] = ()) -> Runtime | None:
    """Return the runtime if it is there; never makes one. Reads one small file, unless `config.interpreter` is set.

    `gymgate cache clean` leaves it alone while this process lives.
    """
    recipe = _recipe(config, requirements)
    if config.interpreter is not None:
        python = Path(config.interpreter).expanduser()
        hold(python.absolute().parent.parent / MARKER)  # it may be one of gymgate's own
        return inspect_runtime(python, recipe.requirements)
    paths = runtimes_dir().glob(f"nemo-gym-{recipe.version}-py*-{recipe.digest}")
    runtimes = [runtime for path in paths if (runtime := read_runtime(path)) is not None]
    for runtime in sorted(runtimes, key=lambda runtime: runtime.interpreter.version, reverse=True):
        fits = config.python is None or is_named(runtime.interpreter, config.python)
        # One that `gymgate cache clean` has just taken away cannot be held.
        if fits and hold(runtime.python.parents[1] / MARKER):
            return runtime
    return None


def ensure_runtime(
    config: RuntimeConfig, requirements: Iterable[str] = (), *, progress: Progress | None = None
) -> Runtime:
    """Return the runtime for `config` with `requirements` (PyPI requirement strings); made on first use.

    Blocks: about 15 s with a warm uv cache, a minute or more without. Instant, and offline, once made. Any number of
    processes may call it at once; `gymgate cache clean` leaves it alone while one of them lives. `progress` gets a line
    per step; warnings, which start with `warning: `, go to the log without it. Raises `SetupError`.
    """
    recipe = _recipe(config, requirements)
    if (existing := find_runtime(config, recipe.requirements)) is not None:
        return existing
    find_uv()
    with writing(runtimes_dir()):  # a cache that cannot be written is reported before anything is downloaded
        pass
    report = progress or _log
    base = find_runtime(config) if recipe.requirements else None
    failures: list[str] = []
    for interpreter in _interpreters(config, base, report):
        try:
            runtime = read_runtime(_build(recipe, interpreter, base, report))
            assert runtime is not None
            return runtime
        except UnusableInterpreterError as error:
            failures.append(str(error))
            report(f"warning: {error}")
    raise SetupError(
        f"no interpreter on this machine can run nemo-gym {config.version}: {'; '.join(failures)}"
    )


def open_catalog(
    config: RuntimeConfig | None = None, roots: Sequence[str] = (), *, progress: Progress | None = None
) -> Catalog:
    """Return the catalog of a release. A supported release is installed when the catalog first needs one of its files.

    `roots` are directories with servers of your own; `progress` gets a line per step of the installation.
    """
    config = config or RuntimeConfig()
    own = [Path(root).expanduser() for root in roots]
    runtime = find_runtime(config)
    if runtime is None and has_scan(config.version):
        return Catalog(lambda: ensure_runtime(config, progress=progress).site, config.version, own)
    installed = runtime or ensure_runtime(config, progress=progress)
    return Catalog(installed.site, installed.version, own)


def runtimes_dir() -> Path:
    """Return the directory of all runtimes. Raises `SetupError` for another user's, unless it was asked for by name."""
    path = cache_dir() / "runtimes"
    is_named = bool(os.environ.get("GYMGATE_CACHE"))
    if not is_named and path.exists() and (owner := path.stat().st_uid) not in (os.getuid(), 0):
        raise SetupError(
            f"{path} belongs to user {owner}, and its programs would run as user {os.getuid()}; set HOME or GYMGATE_CACHE"
        )
    return path


def _interpreters(config: RuntimeConfig, base: Runtime | None, report: Progress) -> Iterator[Interpreter]:
    """Yield the interpreters to try: that of `base`, then all by preference. Says so of one older than the release declares."""
    if base is not None:  # it has proved that it runs the release, and its bytecode can be shared
        yield base.interpreter
    is_reported = base is not None
    for interpreter in choose(config.python, PYTHON_FLOOR, report):
        if base is not None and interpreter == base.interpreter:
            continue
        if interpreter.version < PYTHON_FLOOR and not is_reported:
            is_reported = True
            report(
                f"using {interpreter}: nemo-gym's own minimum, Python {text(PYTHON_FLOOR)}, is not on this machine"
            )
        yield interpreter


def _build(recipe: Recipe, interpreter: Interpreter, base: Runtime | None, report: Progress) -> Path:
    def make(path: Path, lock: int) -> dict[str, Any]:
        return Installation(recipe, interpreter, path, lock, report).make(base.site if base else None)

    try:
        return build_once(runtimes_dir(), recipe.name(interpreter), make, report)
    except UvFailedError as error:
        if error.kind == "disk":
            raise no_space(runtimes_dir()) from error
        reason = explain_failure(error, recipe.requirements)
        raise SetupError(
            f"cannot install nemo-gym {recipe.version}: {reason}",
            kind=error.kind,
            requirement=_unreachable(error, recipe.requirements),
        ) from error


def explain_failure(error: UvFailedError, requirements: Sequence[str]) -> str:
    """Say on one line why uv failed and what to do; name the requirement that is on no index, if that one failed."""
    if offline() and error.kind in ("network", "conflict"):
        return f"the network is off (GYMGATE_OFFLINE or UV_OFFLINE) and uv's cache lacks a package: {error}"
    if error.kind != "network":
        return str(error)
    if requirement := _unreachable(error, requirements):
        return f"cannot fetch {requirement}, which is on no package index: {error}"
    return (
        f"cannot reach the package index: {error}; check the network, HTTPS_PROXY, and the index that is configured "
        f"(UV_DEFAULT_INDEX, UV_INDEX, PIP_INDEX_URL, pip.conf)"
    )


def _unreachable(error: UvFailedError, requirements: Sequence[str]) -> str | None:
    """Return the requirement that names an address which uv could not reach."""
    if error.kind != "network":
        return None
    return next(
        (
            requirement
            for requirement in requirements
            if (address := _ADDRESS.search(requirement)) is not None and address[0] in error.output
        ),
        None,
    )


def _log(line: str) -> None:
    level = logging.WARNING if line.startswith("warning: ") else logging.INFO
    logger.log(level, "%s", line.removeprefix("warning: "))


def _recipe(config: RuntimeConfig, requirements: Iterable[str]) -> Recipe:
    try:
        release = str(Release(config.version))
    except InvalidVersion as error:
        raise ConfigError(
            f"nemo-gym release {config.version!r} is not a version; write e.g. {DEFAULT_NEMO_GYM}"
        ) from error
    lock = read_lock(release)
    extra = tuple(sorted({requirement.strip() for requirement in requirements}))
    for requirement in extra:
        if not requirement or requirement.startswith("-") or "\n" in requirement:
            raise ConfigError(
                f"requirement {requirement!r} is not a package that an index or URL can provide"
            )
    identity = "\n".join([lock or release, *extra, platform.machine(), platform.system()])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return Recipe(release, lock, extra, digest)
