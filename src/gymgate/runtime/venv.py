"""A directory of virtual environments, each made once: beside its place, under a file lock, then renamed into it."""

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
from gymgate.runtime.held import hold, try_lock
from gymgate.runtime.installer import Progress
from gymgate.runtime.interpreters import Interpreter, NotUsableError, probe

MARKER = "gymgate.json"
"""Written last, inside the environment; what has none is not complete."""
UNFINISHED = ".tmp-"
"""In the name of what is being made, or removed."""
_POLL_S = 0.1
_LOCK_TIMEOUT_S = 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Facts:
    """What was noted of an environment when it was made."""

    site: Path
    nemo_gym: str | None
    python: str
    """Version, `3.13.0`."""
    interpreter: Path
    """The program it was made with."""


Make = Callable[[Path, int], dict[str, Any]]
"""Makes an environment at a path and returns what to note of it; the descriptor is the lock, for children to hold."""


def facts_of(path: Path) -> Facts | None:
    """What was noted of the environment at `path`; `None` if it is not complete, or its interpreter is gone."""
    try:
        noted = json.loads((path / MARKER).read_text(encoding="utf-8"))
        facts = Facts(
            site=path / noted["site"],
            nemo_gym=noted["nemo_gym"],
            python=noted["python"],
            interpreter=Path(noted["interpreter"]["path"]),
        )
        stamp = noted["interpreter"].get("stamp")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    python = path / "bin" / "python"
    if not os.access(python, os.X_OK):
        return None
    return facts if stamp == _stamp(python) or _same_minor(python, facts.python) else None


def build_once(root: Path, name: str, make: Make, say: Progress) -> Path:
    """The environment `root/name`, made if it is not there; any number of processes may call this at once.

    What an interrupted call leaves does not count, and the next call removes it. It stays while this process lives (see
    `hold`). Raises `SetupError` if `root` cannot be written, and what `make` raises.
    """
    place = root / name
    with writing(root), locked(root, f"making {name}", say) as held:
        for left in root.glob(f"*{UNFINISHED}*"):
            remove(left)
        if facts_of(place) is not None and hold(place / MARKER):
            return place
        unfinished = Path(tempfile.mkdtemp(prefix=f"{name}{UNFINISHED}", dir=root))
        try:
            noted = make(unfinished, held)
            (unfinished / MARKER).write_text(json.dumps(noted, indent=2), encoding="utf-8")
            discard(place)
            unfinished.rename(place)
            hold(place / MARKER)
        except BaseException:
            remove(unfinished)
            raise
    return place


def noted_interpreter(interpreter: Interpreter, python: Path) -> dict[str, Any]:
    """What the marker keeps of the interpreter behind `python`; `facts_of` sees by it that another took its place."""
    return {"path": str(interpreter.path), "version": interpreter.label, "stamp": _stamp(python)}


def _stamp(python: Path) -> list[int]:
    status = python.stat()
    return [status.st_size, status.st_mtime_ns]


def _same_minor(python: Path, noted: str) -> bool:
    """An upgrade in place to another patch release is fine; another minor version has other package directories."""
    try:
        return probe(python).label.split(".")[:2] == noted.split(".")[:2]
    except NotUsableError:
        return False


@contextlib.contextmanager
def locked(root: Path, activity: str, say: Progress) -> Iterator[int]:
    """The descriptor of the lock on `root`; who waits for it is told that this process is `activity`.

    Children that inherit it hold the lock until they end, too.
    """
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(descriptor):
            say(f"waiting for process {_holder(descriptor)}")
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise SetupError(
                    f"process {_holder(descriptor)}, has held {root / '.lock'} for {_LOCK_TIMEOUT_S:g} s; "
                    f"end it if it hangs, then try again"
                )
            time.sleep(_POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}, which is {activity}".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 500, 0).decode(errors="replace") or "(unknown)"


@contextlib.contextmanager
def writing(root: Path) -> Iterator[None]:
    """Make `root`; what the file system refuses, here or in the body, becomes a `SetupError`."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if isinstance(error, SetupError):
            raise
        if error.errno in _FULL:
            raise no_space(root) from error
        raise SetupError(
            f"cannot write under {root}: {error.strerror or error}; set GYMGATE_CACHE to a directory of yours"
        ) from error


def no_space(root: Path) -> SetupError:
    """The error for a full disk (or quota) under `root`."""
    free = shutil.disk_usage(root).free / 1e9 if root.exists() else 0.0
    return SetupError(
        f"no space left on the disk while making {root} ({free:.1f} GB free, about 3 GB are needed with uv's cache): "
        f"free some, or set GYMGATE_CACHE and UV_CACHE_DIR to a larger disk"
    )


def discard(place: Path) -> None:
    """Take a directory out of its place at once, then remove its files."""
    if place.exists():
        aside = Path(tempfile.mkdtemp(prefix=f"{place.name}{UNFINISHED}", dir=place.parent))
        place.rename(aside / "old")
        remove(aside)


def remove(path: Path) -> None:
    """Remove a directory as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)
