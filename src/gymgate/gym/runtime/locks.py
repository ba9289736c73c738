"""Locks on files: `locked` for one process at a time, `hold` for the users of a cache entry.

The kernel releases a lock when the last process that has it ends, however it ends; forked children share their parent's.
The modification time of an entry's file says when the entry was last used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from gymgate.core.errors import SetupError
from gymgate.gym.runtime.command import Progress

_PATIENCE_S = 2.0
"""Longer than it takes to move an entry out of its place, or to find out whether it is in use."""
_POLL_S = 0.01
"""Between tries: `flock` itself waits without a limit."""

_held: dict[Path, int] = {}
"""Descriptors by file, open for as long as the process lives."""


@contextlib.contextmanager
def locked(
    file: Path, activity: str = "", progress: Progress = lambda _: None, timeout_s: float = 3600.0
) -> Iterator[int]:
    """Lock `file`, made if need be, for this process alone; give its descriptor.

    A process that waits reports that it waits for this one, which is `activity`. A child that inherits the descriptor
    holds the lock, too, until it ends. Raises `SetupError` after `timeout_s`, and `OSError`.
    """
    deadline = time.monotonic() + timeout_s
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def holder() -> str:
        return os.pread(descriptor, 500, 0).decode(errors="replace") or "(unknown)"

    try:
        if not try_lock(descriptor):
            progress(f"waiting for process {holder()}")
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                raise SetupError(
                    f"waited {timeout_s:g} s for the lock {file}, held by process {holder()}; "
                    f"end that process if it hangs, then try again"
                )
            time.sleep(_POLL_S)
        if activity:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}, which is {activity}".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def hold(file: Path) -> bool:
    """Keep the cache entry of `file` from being removed while this process lives, and note that it is used now.

    Return `False` if it is gone. Best effort on file systems without locks, and in a cache that cannot be written.
    """
    if not _is_open(file, _held.get(file)):
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        if not (_share(descriptor) and _is_open(file, descriptor)):
            os.close(descriptor)
            return False
        # Of two threads that come here at once, the first one's lock stays open, too.
        _held[file] = descriptor
    with contextlib.suppress(OSError):
        os.utime(file)
    return True


def inherit_locks_on_exec() -> None:
    """Let the program that takes the place of this process (`os.execve`) hold what this process holds."""
    for descriptor in _held.values():
        os.set_inheritable(descriptor, True)


@contextlib.contextmanager
def try_exclusive(file: Path) -> Iterator[bool]:
    """Yield whether no process holds `file`; new holders are kept out inside the block. A missing file is unused.

    Raises `OSError` where locks do not work.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)  # network file systems want it writable
    except FileNotFoundError:
        yield True
        return
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process alone, unless a process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holders(file: Path) -> list[int]:
    """Return the processes that have locked `file`, of those that this machine and PID namespace show."""
    try:
        status, locks = file.stat(), Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return []
    inode = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    lines = [line.split() for line in locks.splitlines() if " FLOCK " in line]
    return sorted({int(words[4]) for words in lines if words[5] == inode and words[4].isdecimal()})


def _share(descriptor: int) -> bool:
    """Take the shared lock; give up if another process has the file alone for longer than a check takes."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        except OSError:  # this file system has no locks
            return True


def _is_open(file: Path, descriptor: int | None) -> bool:
    """Whether the descriptor is open on the file that is now at that path."""
    try:
        return descriptor is not None and os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False
