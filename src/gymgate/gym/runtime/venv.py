"""Virtual environments and npm's packages: each is made once, and read again only if it still fits.

It is made under a file lock, in a directory next to its place that is then renamed into it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymgate.core import codec
from gymgate.core.errors import SetupError
from gymgate.gym.runtime.command import CommandError, Progress, run_command
from gymgate.gym.runtime.interpreters import Interpreter
from gymgate.gym.runtime.locks import hold, locked
from gymgate.gym.runtime.variables import clean_env

MARKER = "gymgate.json"
"""File in the environment that describes it. It is written last: an environment without it is not complete."""
UNFINISHED = ".tmp-"
"""In the name of a directory that is being made or removed."""
LOCK = ".lock"
"""File in a directory of environments that is locked while one is made or removed."""
_INSPECT_TIMEOUT_S = 60.0
_INSPECT = (
    "import importlib.metadata, importlib.util, json, os, sys\n"
    "try: version = importlib.metadata.version('nemo-gym')\n"
    "except importlib.metadata.PackageNotFoundError: version = None\n"
    "spec = importlib.util.find_spec('nemo_gym')\n"
    "site = os.path.dirname(list(spec.submodule_search_locations)[0]) if spec else None\n"
    "print(json.dumps([site, version, sys.version_info[:3]]))"
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Runtime:
    """An interpreter with nemo-gym installed."""

    python: Path
    site: Path
    """Directory of the installed packages, NeMo Gym's servers among them."""
    version: str
    """Release of nemo-gym."""
    requirements: tuple[str, ...]
    """Requirements installed beside it."""
    interpreter: Interpreter
    """The interpreter that the virtual environment was made with; `python` itself if gymgate did not make it."""


Make = Callable[[Path, int], dict[str, Any]]
"""Fills a directory and returns its marker's content. Children inherit the descriptor, which is the lock."""


def read_marker(path: Path) -> dict[str, Any] | None:
    """Return the content of the marker in a directory; `None` if there is none, or it is not ours."""
    try:
        content = codec.loads((path / MARKER).read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_runtime(path: Path) -> Runtime | None:
    """Return what the marker says; `None` if the environment is not complete or its interpreter is gone."""
    python, marker = path / "bin" / "python", read_marker(path) or {}
    try:
        major, minor, patch = map(int, marker["python"].split("."))
        interpreter = Interpreter(Path(marker["interpreter"]["path"]), (major, minor, patch))
        requirements = tuple(marker["requirements"])
        runtime = Runtime(python, path / marker["site"], marker["nemo_gym"], requirements, interpreter)
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
    # Where an upgrade put another minor version in the interpreter's place, packages are not found.
    now = re.fullmatch(r"python(3\.\d+)", python.resolve().name)
    fits = now is None or now[1] == f"{major}.{minor}"
    return runtime if fits and os.access(python, os.X_OK) else None


def inspect_runtime(python: Path, requirements: tuple[str, ...]) -> Runtime:
    """Return the runtime of an interpreter that has nemo-gym. Raises `SetupError`."""
    try:
        answer = run_command([python, "-I", "-c", _INSPECT], env=clean_env(), timeout_s=_INSPECT_TIMEOUT_S)
        site, release, (major, minor, patch) = codec.loads(answer.encode())
    except CommandError as error:
        raise SetupError(f"interpreter {str(python)!r} does not run: {error.last_line}") from error
    except ValueError as error:
        raise SetupError(f"interpreter {str(python)!r} does not run: {error}") from error
    if site is None or release is None:
        raise SetupError(f"interpreter {str(python)!r} has no nemo-gym installed")
    return Runtime(python, Path(site), release, requirements, Interpreter(python, (major, minor, patch)))


def build_once(
    root: Path, name: str, make: Make, progress: Progress, usable: Callable[[Path], object] = read_runtime
) -> Path:
    """Return the directory `root/name`, made if none is there that is `usable`. Many processes may call this at once.

    An interrupted call leaves nothing that counts, and the next call removes it. The directory stays while this process
    lives (see `hold`). Raises `SetupError` if `root` cannot be written, and what `make` raises.
    """
    place = root / name
    with writing(root), locked(root / LOCK, f"making {name}", progress) as lock:
        for leftover in root.glob(f"*{UNFINISHED}*"):
            remove_tree(leftover)
        if usable(place) and hold(place / MARKER):
            return place
        unfinished = Path(tempfile.mkdtemp(prefix=f"{name}{UNFINISHED}", dir=root))
        try:
            marker = make(unfinished, lock)
            # The marker comes last, and the place is taken in one step: at no time is there half an environment.
            (unfinished / MARKER).write_bytes(codec.dumps(marker))
            discard(place)
            unfinished.rename(place)
            hold(place / MARKER)  # still under the lock, so that nobody removes it before
        except BaseException:
            remove_tree(unfinished)
            raise
    return place


@contextlib.contextmanager
def writing(root: Path) -> Iterator[None]:
    """Make the directory `root`; an `OSError` here or in the body becomes a `SetupError` that says what to do."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if isinstance(error, SetupError):
            raise
        if error.errno in _FULL:
            raise no_space(root) from error
        raise SetupError(
            f"cannot write under {root}: {error.strerror or error}; set GYMGATE_CACHE to a directory that you can write"
        ) from error


def no_space(root: Path) -> SetupError:
    """The error for a full disk (or quota) under `root`."""
    free = shutil.disk_usage(root).free / 1e9 if root.exists() else 0.0
    return SetupError(
        f"no space left on the disk while making {root} ({free:.1f} GB free; an installation takes about 3 GB with uv's "
        f"cache): free some, or set GYMGATE_CACHE and UV_CACHE_DIR to directories on a larger disk"
    )


def discard(path: Path) -> None:
    """Take a directory out of its place at once, then remove its files."""
    if path.exists():
        aside = Path(tempfile.mkdtemp(prefix=f"{path.name}{UNFINISHED}", dir=path.parent))
        path.rename(aside / "old")
        remove_tree(aside)


def remove_tree(path: Path) -> None:
    """Remove a directory as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)
