"""Virtual environments and npm's packages: each is made once, under a file lock, beside its place, then renamed into it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymgate.errors import SetupError
from gymgate.runtime.command import Progress
from gymgate.runtime.held import hold, try_lock
from gymgate.runtime.interpreters import Interpreter, NotUsableError, probe

MARKER = "gymgate.json"
"""File in the environment that describes it. It is written last: an environment without it is not complete."""
UNFINISHED = ".tmp-"
"""In the name of a directory that is being made or removed."""
_POLL_S = 0.1
_LOCK_TIMEOUT_S = 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class MadeEnvironment:
    """The content of a virtual environment's marker."""

    site: Path
    """Directory of its packages."""
    nemo_gym: str | None
    """Release of nemo-gym in it."""
    python: str
    """Version of its Python: `3.13.0`."""
    interpreter: Path
    """The interpreter that it was made with."""


Make = Callable[[Path, int], dict[str, Any]]
"""Fills a directory and returns its marker's content. Children inherit the descriptor, which is the lock."""


def read_marker(path: Path) -> dict[str, Any] | None:
    """Return the content of the marker in a directory; `None` if there is none, or it is not ours."""
    try:
        content = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def read_installed(path: Path) -> MadeEnvironment | None:
    """Return what the marker says; `None` if the environment is not complete or its interpreter is gone."""
    try:
        marker = read_marker(path) or {}
        interpreter = Path(marker["interpreter"]["path"])
        installed = MadeEnvironment(path / marker["site"], marker["nemo_gym"], marker["python"], interpreter)
        stamp = marker["interpreter"].get("stamp")
    except (KeyError, TypeError, AttributeError):
        return None
    python = path / "bin" / "python"
    if not os.access(python, os.X_OK):
        return None
    return installed if stamp == _stamp(python) or _same_minor(python, installed.python) else None


def is_whole(path: Path) -> bool:
    """Return whether the directory is an environment that can be used."""
    return read_installed(path) is not None


def build_once(
    root: Path, name: str, make: Make, progress: Progress, usable: Callable[[Path], bool] = is_whole
) -> Path:
    """Return the directory `root/name`, made if none is there that is `usable`. Many processes may call this at once.

    An interrupted call leaves nothing that counts, and the next call removes it. The directory stays while this process
    lives (see `hold`). Raises `SetupError` if `root` cannot be written, and what `make` raises.
    """
    place = root / name
    with writing(root), locked(root, f"making {name}", progress) as lock:
        for leftover in root.glob(f"*{UNFINISHED}*"):
            remove(leftover)
        if usable(place) and hold(place / MARKER):
            return place
        unfinished = Path(tempfile.mkdtemp(prefix=f"{name}{UNFINISHED}", dir=root))
        try:
            marker = make(unfinished, lock)
            (unfinished / MARKER).write_text(json.dumps(marker, indent=2), encoding="utf-8")
            discard(place)
            unfinished.rename(place)
            hold(place / MARKER)
        except BaseException:
            remove(unfinished)
            raise
    return place


def noted_interpreter(interpreter: Interpreter, python: Path) -> dict[str, Any]:
    """Return the identity of the interpreter behind `python`, so that `read_installed` sees when another replaces it."""
    return {"path": str(interpreter.path), "stamp": _stamp(python)}


def _stamp(python: Path) -> list[int]:
    status = python.stat()
    return [status.st_size, status.st_mtime_ns]


def _same_minor(python: Path, version: str) -> bool:
    """An upgrade in place to another patch release is fine; another minor version has other package directories."""
    try:
        return probe(python).label.split(".")[:2] == version.split(".")[:2]
    except NotUsableError:
        return False


@contextlib.contextmanager
def locked(root: Path, activity: str, progress: Progress) -> Iterator[int]:
    """Hold the lock on `root` and give its descriptor; a process that waits is told that this one is `activity`.

    A child that inherits the descriptor holds the lock, too, until it ends.
    """
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)

    def holder() -> str:
        return os.pread(descriptor, 500, 0).decode(errors="replace") or "(unknown)"

    try:
        if not try_lock(descriptor):
            progress(f"waiting for process {holder()}")
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise SetupError(
                    f"waited {_LOCK_TIMEOUT_S:g} s for the lock {root / '.lock'}, held by process {holder()}; "
                    f"end that process if it hangs, then try again"
                )
            time.sleep(_POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}, which is {activity}".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


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
        remove(aside)


def remove(path: Path) -> None:
    """Remove a directory as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)
