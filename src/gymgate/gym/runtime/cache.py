"""List, measure and remove cached runtimes, and whatever else the cache holds."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from gymgate.core.config import cache_dir
from gymgate.gym.runtime.command import Progress
from gymgate.gym.runtime.lockfile import package_of
from gymgate.gym.runtime.locks import hold, holders, locked, try_exclusive
from gymgate.gym.runtime.venv import LOCK, MARKER, UNFINISHED, discard, read_marker, writing

Kind = Literal["runtime", "command", "downloads", "index", "leftover"]

_USED = ".used"
_MADE = ("runtimes", "npm")
"""Directories whose entries are made under a lock."""


@dataclass(frozen=True)
class CacheEntry:
    """A directory in the cache that is removed as a whole."""

    kind: Kind
    path: Path
    detail: str
    """Its content, on one line."""
    lock: Path | None = None
    """The file that its users lock; `None` if nothing shows who uses it."""
    requirements: tuple[str, ...] = ()
    """Requirements that a runtime has beside nemo-gym."""

    @property
    def packages(self) -> list[str]:
        """The names of the requirements, in their order."""
        return [package_of(requirement) for requirement in self.requirements]

    @property
    def last_used(self) -> float:
        """Wall-clock seconds of the last use, where that is recorded, else of the last change."""
        return (self.lock if self.lock is not None and self.lock.exists() else self.path).stat().st_mtime

    def users(self) -> list[int] | None:
        """The processes that use it, as far as they can be known; `None` if nobody does."""
        if self.lock is None:
            return None
        try:
            with try_exclusive(self.lock) as unused:
                return None if unused else holders(self.lock)
        except OSError:  # another user's
            return holders(self.lock) or None


class Removal(NamedTuple):
    """An entry that `clean` removed, or had to leave."""

    entry: CacheEntry
    size: int
    reason: str
    """Why it could not be removed; empty if it was."""


def cache_entries() -> list[CacheEntry]:
    """Return everything in the cache that can be removed, as it is now."""
    root = cache_dir()
    entries = [_cache_entry(path) for name in _MADE for path in _directories(root / name)]
    entries += [CacheEntry("leftover", path, "half removed") for path in root.glob(f"*{UNFINISHED}*")]
    for path in _directories(root / "data"):
        lock = path.with_name(f".{path.name}{LOCK}")
        entries.append(CacheEntry("downloads", path, "files that `gymgate data prepare` downloaded", lock))
    gym, rows = root / "gym", root / "rows"
    entries.append(CacheEntry("downloads", gym, "files that NeMo Gym's servers downloaded", gym / _USED))
    entries.append(CacheEntry("index", rows, "offsets of rows in data files, calls that rows list"))
    return [entry for entry in entries if entry.path.is_dir()]


def clean(
    unused_for_s: float | None, *, dry_run: bool = False, progress: Progress = lambda _: None
) -> Iterator[Removal]:
    """Remove entries that were not used for `unused_for_s` seconds, or with `None` all that are not in use.

    Yields those that were due. Waits for a process that is making an entry, and lets none begin meanwhile. An entry that
    a process uses always stays.
    """
    with contextlib.ExitStack() as locks:
        # Always in this order, or two that clean at once could wait for each other.
        for root in () if dry_run else (cache_dir() / name for name in _MADE):
            if root.is_dir():
                locks.enter_context(writing(root))
                locks.enter_context(locked(root / LOCK, "removing unused cache entries", progress))
        for entry in cache_entries():
            try:
                is_old = unused_for_s is None or time.time() - entry.last_used >= unused_for_s
                if is_old or entry.kind == "leftover":
                    yield _remove(entry, dry_run)
            except FileNotFoundError:  # another process removed it
                continue
            except OSError as error:
                yield Removal(entry, 0, error.strerror or str(error))


def measure(*paths: Path) -> int:
    """Return the bytes on disk of the files below directories, a file with several links counted once."""
    blocks: dict[tuple[int, int], int] = {}
    for parent, directories, names in (entry for path in paths for entry in os.walk(path)):
        for name in (".", *directories, *names):
            with contextlib.suppress(OSError):
                status = os.lstat(f"{parent}/{name}")
                blocks[status.st_dev, status.st_ino] = status.st_blocks
    return 512 * sum(blocks.values())


def gym_cache() -> Path:
    """Return the directory for files that NeMo Gym's servers download; it stays while this process lives."""
    path = cache_dir() / "gym"
    with contextlib.suppress(OSError):  # a cache that cannot be written: servers do what they can
        for _ in range(3):  # another process may remove it meanwhile
            path.mkdir(parents=True, exist_ok=True)
            (path / _USED).touch()
            if hold(path / _USED):
                break
    return path


def _remove(entry: CacheEntry, dry_run: bool) -> Removal:
    lock = None if entry.kind == "leftover" and not dry_run else entry.lock  # `clean` holds a leftover's lock
    with contextlib.nullcontext(True) if lock is None else try_exclusive(lock) as unused:
        if not unused:
            users = ", ".join(map(str, holders(lock) if lock is not None else []))
            return Removal(entry, 0, f"in use by process {users}" if users else "in use")
        size = measure(entry.path)
        if not dry_run:
            discard(entry.path)
    return Removal(entry, size, "")


def _cache_entry(path: Path) -> CacheEntry:
    marker = read_marker(path)
    if UNFINISHED in path.name or marker is None:
        return CacheEntry("leftover", path, "an interrupted installation", path.parent / LOCK)
    if path.parent.name == "npm":
        return CacheEntry("command", path, f"npm: {marker.get('package', path.name)}", path / MARKER)
    requirements = tuple(str(requirement) for requirement in marker.get("requirements") or ())
    detail = f"nemo-gym {marker.get('nemo_gym')}, Python {marker.get('python')}"
    return CacheEntry("runtime", path, detail, path / MARKER, requirements)


def _directories(root: Path) -> list[Path]:
    """The entries of a directory of the cache; none if there is no such directory."""
    return sorted(path for path in root.glob("*") if not path.name.startswith("."))
