"""What lies in the cache: how large, when last used, whether in use; and its removal."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gymgate.config import cache_dir
from gymgate.runtime.held import alone, hold, holders
from gymgate.runtime.lockfile import package_of
from gymgate.runtime.venv import MARKER, UNFINISHED, discard, locked, remove, writing

Progress = Callable[[str], None]
Kind = Literal["runtime", "command", "downloads", "index", "leftover", "other"]

_USED = ".used"
_LOCKED_ROOTS = ("runtimes", "npm")
"""Directories in which things are made under a lock."""


@dataclass(frozen=True)
class Part:
    """Something in the cache that is removed as a whole."""

    kind: Kind
    path: Path
    detail: str
    """What it holds, on one line."""
    lock: Path | None = None
    """The file that its users lock; `None`: nothing says who uses it."""
    requirements: tuple[str, ...] = ()
    """Of a runtime: what was installed beside nemo-gym."""

    @property
    def packages(self) -> list[str]:
        """The names of the requirements, in their order."""
        return [package_of(requirement) for requirement in self.requirements]

    @property
    def last_used(self) -> float:
        """Wall-clock seconds. Of what does not record it, when it last changed."""
        records = self.lock is not None and self.lock.name in (MARKER, _USED) and self.lock.exists()
        return (self.lock if self.lock is not None and records else self.path).stat().st_mtime

    def users(self) -> list[int] | None:
        """`None` if nobody uses it; else the processes that do, as far as they can be known."""
        if self.lock is None:
            return None
        try:
            with alone(self.lock) as unused:
                return None if unused else holders(self.lock)
        except OSError:  # somebody else's
            return holders(self.lock) or None


class Size(NamedTuple):
    """Bytes on disk."""

    total: int
    alone: int
    """What removal frees: a file that uv's cache or another runtime has, too, stays."""


class Outcome(NamedTuple):
    """What became of a part."""

    part: Part
    removed: bool
    freed: int
    """Bytes."""
    why: str = ""
    """Why it stays: in use, used lately, or what the file system says."""
    in_the_way: bool = False
    """Whether that is other than what was asked for."""


def parts() -> list[Part]:
    """Everything in the cache, as it is now."""
    root = cache_dir()
    readers: dict[str, Callable[[Path], Iterator[Part]]] = {
        "runtimes": _runtimes,
        "npm": _commands,
        "gym": _gym,
        "data": _data,
        "catalog": lambda place: _files(place, "what a release offers"),
        "rows": lambda place: _files(place, "offsets of a file's rows"),
    }
    found: list[Part] = []
    for place in sorted(_entries(root)):
        if UNFINISHED in place.name:
            found.append(_leftover(place))
        elif place.name in readers:
            found += readers[place.name](place)
        else:
            told = "sockets and logs; a stack removes its own" if place.name == "run" else "not known"
            found.append(Part("other", place, told))
    return found


def clean(
    unused_for_s: float | None, *, dry_run: bool = False, say: Progress = lambda _: None
) -> Iterator[Outcome]:
    """Remove what nobody used for `unused_for_s` seconds; `None`: whatever nobody uses now. Yields what became of each part.

    Waits for a process that makes an environment, and lets none begin meanwhile. What a process uses always stays.
    """
    found = parts()
    for root in _LOCKED_ROOTS:
        place = cache_dir() / root
        if dry_run or not place.is_dir():
            continue
        with writing(place), locked(place, "removing what is not used", say):
            here = [part for part in parts() if part.path.parent == place]
            found = [part for part in found if part.path.parent != place]
            yield from _removed(here, unused_for_s, dry_run)
    yield from _removed(found, unused_for_s, dry_run)


def measure(*paths: Path) -> Size:
    """The size of files and directories taken together."""
    seen: dict[tuple[int, int], list[int]] = {}
    for status in _statuses(paths):
        links = 1 if stat.S_ISDIR(status.st_mode) else status.st_nlink
        seen.setdefault((status.st_dev, status.st_ino), [status.st_blocks * 512, links])[1] -= 1
    return Size(
        sum(size for size, _ in seen.values()),
        sum(size for size, elsewhere in seen.values() if not elsewhere),
    )


def gym_cache() -> Path:
    """The directory for what NeMo Gym's servers download; it stays while this process lives."""
    place = cache_dir() / "gym"
    with contextlib.suppress(OSError):  # of a cache that cannot be written, servers make what they can
        for _ in range(3):  # it may be removed meanwhile
            place.mkdir(parents=True, exist_ok=True)
            (place / _USED).touch()
            if hold(place / _USED):
                break
    return place


def _removed(found: Iterable[Part], unused_for_s: float | None, dry_run: bool) -> Iterator[Outcome]:
    now = time.time()
    for part in found:
        try:
            yield _outcome(part, unused_for_s, now, dry_run)
        except FileNotFoundError:  # another process removed it
            continue
        except OSError as error:
            yield Outcome(part, False, 0, error.strerror or str(error), True)


def _outcome(part: Part, unused_for_s: float | None, now: float, dry_run: bool) -> Outcome:
    if part.kind == "other":
        return Outcome(part, False, 0, part.detail)
    if part.kind != "leftover" and unused_for_s is not None and now - part.last_used < unused_for_s:
        return Outcome(part, False, 0, "used lately")
    lock = None if part.kind == "leftover" and not dry_run else part.lock  # that one is held here
    with contextlib.nullcontext(True) if lock is None else alone(lock) as unused:
        if not unused:
            by = ", ".join(map(str, holders(lock) if lock is not None else []))
            return Outcome(part, False, 0, f"in use by process {by}" if by else "in use", True)
        freed = measure(part.path).alone
        if not dry_run:
            _remove(part)
    return Outcome(part, True, freed)


def _remove(part: Part) -> None:
    if (
        part.path.is_dir()
        and part.kind == "downloads"
        and part.lock is not None
        and part.lock.name == ".lock"
    ):
        for entry in _entries(part.path, hidden=True):  # others may wait for the lock, which stays
            if entry != part.lock:
                remove(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    elif part.path.is_dir():
        discard(part.path)
    else:
        part.path.unlink()


def _runtimes(root: Path) -> Iterator[Part]:
    for place in sorted(_entries(root)):
        noted = _noted(place / MARKER)
        if noted is None or UNFINISHED in place.name:
            yield _leftover(place)
            continue
        requirements = tuple(str(each) for each in noted.get("requirements") or ())
        told = f"nemo-gym {noted.get('nemo_gym')}, Python {noted.get('python')}"
        yield Part("runtime", place, told, place / MARKER, requirements)


def _commands(root: Path) -> Iterator[Part]:
    for place in sorted(_entries(root)):
        if UNFINISHED in place.name:
            yield _leftover(place)
        else:
            noted = _noted(place / MARKER) or {}
            yield Part("command", place, f"npm: {noted.get('package', place.name)}", place / MARKER)


def _gym(place: Path) -> Iterator[Part]:
    yield Part("downloads", place, "what NeMo Gym's servers fetched", place / _USED)


def _data(root: Path) -> Iterator[Part]:
    for place in sorted(_entries(root)):
        yield Part("downloads", place, "what `gymgate data prepare` fetched", place / ".lock")


def _files(root: Path, told: str) -> Iterator[Part]:
    for place in sorted(_entries(root)):
        yield Part("index", place, told)


def _leftover(place: Path) -> Part:
    lock = place.parent / ".lock"
    return Part("leftover", place, "of an interrupted installation", lock if lock.exists() else None)


def _noted(marker: Path) -> dict[str, Any] | None:
    try:
        noted = json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return noted if isinstance(noted, dict) else None


def _entries(root: Path, *, hidden: bool = False) -> list[Path]:
    try:
        return [place for place in root.iterdir() if hidden or not place.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _statuses(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """Of each file and directory; what vanishes meanwhile is passed over."""
    left = [os.fspath(path) for path in paths]
    while left:
        place = left.pop()
        with contextlib.suppress(OSError):
            status = os.lstat(place)
            yield status
            if stat.S_ISDIR(status.st_mode):
                left += [entry.path for entry in os.scandir(place)]
