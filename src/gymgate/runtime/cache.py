"""The content of the cache: how large it is, when it was last used, whether it is in use; and its removal."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from gymgate.config import cache_dir
from gymgate.runtime.command import Progress
from gymgate.runtime.held import alone, hold, holders
from gymgate.runtime.lockfile import package_of
from gymgate.runtime.venv import MARKER, UNFINISHED, discard, locked, read_marker, remove, writing

Kind = Literal["runtime", "command", "downloads", "index", "leftover", "other"]

_USED = ".used"
_LOCK = ".lock"
_WITH_ENTRIES = ("runtimes", "npm", "data", "rows")
"""Directories of the cache of which each child is an entry."""
_LOCKED = ("runtimes", "npm")
"""Directories whose entries are made under a lock."""


@dataclass(frozen=True)
class CacheEntry:
    """A file or directory in the cache that is removed as a whole."""

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
        recorded = self.lock is not None and self.lock.name != _LOCK and self.lock.exists()
        return (self.lock if self.lock is not None and recorded else self.path).stat().st_mtime

    def users(self) -> list[int] | None:
        """The processes that use it, as far as they can be known; `None` if nobody does."""
        if self.lock is None:
            return None
        try:
            with alone(self.lock) as unused:
                return None if unused else holders(self.lock)
        except OSError:  # another user's
            return holders(self.lock) or None


class Size(NamedTuple):
    """Bytes on disk."""

    total: int
    alone: int
    """Bytes that removal frees: a file that uv's cache or another runtime links to stays on the disk."""


class Removal(NamedTuple):
    """The result of `clean` for one entry."""

    entry: CacheEntry
    removed: bool
    freed: int
    """Bytes."""
    why: str = ""
    """Why it stays: in use, used lately, or an error of the file system."""
    in_the_way: bool = False
    """Whether it should have been removed and could not."""


def cache_entries() -> list[CacheEntry]:
    """Return everything in the cache, as it is now."""
    found: list[CacheEntry] = []
    for path in sorted(_children(cache_dir())):
        if UNFINISHED in path.name:
            found.append(_leftover(path))
        elif path.name in _WITH_ENTRIES:
            found += [_entry(child) for child in sorted(_children(path))]
        elif path.name == "gym":
            found.append(
                CacheEntry("downloads", path, "files that NeMo Gym's servers downloaded", path / _USED)
            )
        else:
            detail = "sockets and logs; a stack removes its own" if path.name == "run" else "not gymgate's"
            found.append(CacheEntry("other", path, detail))
    return found


def clean(
    unused_for_s: float | None, *, dry_run: bool = False, progress: Progress = lambda _: None
) -> Iterator[Removal]:
    """Remove entries that were not used for `unused_for_s` seconds, or with `None` all that are not in use.

    Yields the result for each entry. Waits for a process that is making an entry, and lets none begin meanwhile. An entry
    that a process uses always stays.
    """
    found = cache_entries()
    for name in _LOCKED:
        root = cache_dir() / name
        if dry_run or not root.is_dir():
            continue
        with writing(root), locked(root, "removing unused cache entries", progress):
            here = [entry for entry in cache_entries() if entry.path.parent == root]
            found = [entry for entry in found if entry.path.parent != root]
            yield from _remove_unused(here, unused_for_s, dry_run)
    yield from _remove_unused(found, unused_for_s, dry_run)


def measure(*paths: Path) -> Size:
    """Return the size of files and directories taken together."""
    seen: dict[tuple[int, int], list[int]] = {}
    for status in _statuses(paths):
        links = 1 if stat.S_ISDIR(status.st_mode) else status.st_nlink
        seen.setdefault((status.st_dev, status.st_ino), [status.st_blocks * 512, links])[1] -= 1
    return Size(
        sum(size for size, _ in seen.values()),
        sum(size for size, links_elsewhere in seen.values() if not links_elsewhere),
    )


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


def _remove_unused(
    found: Iterable[CacheEntry], unused_for_s: float | None, dry_run: bool
) -> Iterator[Removal]:
    now = time.time()
    for entry in found:
        try:
            yield _remove_if_unused(entry, unused_for_s, now, dry_run)
        except FileNotFoundError:  # another process removed it
            continue
        except OSError as error:
            yield Removal(entry, False, 0, error.strerror or str(error), True)


def _remove_if_unused(entry: CacheEntry, unused_for_s: float | None, now: float, dry_run: bool) -> Removal:
    if entry.kind == "other":
        return Removal(entry, False, 0, entry.detail)
    if entry.kind != "leftover" and unused_for_s is not None and now - entry.last_used < unused_for_s:
        return Removal(entry, False, 0, "used lately")
    lock = None if entry.kind == "leftover" and not dry_run else entry.lock  # `clean` holds a leftover's lock
    with contextlib.nullcontext(True) if lock is None else alone(lock) as unused:
        if not unused:
            users = ", ".join(map(str, holders(lock) if lock is not None else []))
            return Removal(entry, False, 0, f"in use by process {users}" if users else "in use", True)
        freed = measure(entry.path).alone
        if not dry_run:
            _remove(entry)
    return Removal(entry, True, freed)


def _remove(entry: CacheEntry) -> None:
    if entry.lock == entry.path / _LOCK:
        for child in entry.path.iterdir():  # other processes may wait for the lock, so its file stays
            if child != entry.lock:
                remove(child) if child.is_dir() and not child.is_symlink() else child.unlink()
    elif entry.path.is_dir():
        discard(entry.path)
    else:
        entry.path.unlink()


def _entry(path: Path) -> CacheEntry:
    kind, marker = path.parent.name, read_marker(path)
    if kind == "data":
        return CacheEntry("downloads", path, "files that `gymgate data prepare` downloaded", path / _LOCK)
    if kind == "rows":
        is_oracle = path.name.startswith("oracle-")
        return CacheEntry("index", path, "calls that rows list" if is_oracle else "offsets of a file's rows")
    if UNFINISHED in path.name or (kind == "runtimes" and marker is None):
        return _leftover(path)
    marker = marker or {}
    if kind == "npm":
        return CacheEntry("command", path, f"npm: {marker.get('package', path.name)}", path / MARKER)
    requirements = tuple(str(each) for each in marker.get("requirements") or ())
    detail = f"nemo-gym {marker.get('nemo_gym')}, Python {marker.get('python')}"
    return CacheEntry("runtime", path, detail, path / MARKER, requirements)


def _leftover(path: Path) -> CacheEntry:
    lock = path.parent / _LOCK
    return CacheEntry("leftover", path, "an interrupted installation", lock if lock.exists() else None)


def _children(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.iterdir() if not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _statuses(paths: Iterable[Path]) -> Iterator[os.stat_result]:
    """The status of each file and directory below `paths`; ignores those that vanish meanwhile."""
    left = [os.fspath(path) for path in paths]
    while left:
        path = left.pop()
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            yield status
            if stat.S_ISDIR(status.st_mode):
                left += [entry.path for entry in os.scandir(path)]
