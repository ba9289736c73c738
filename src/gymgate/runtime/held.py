"""What of the cache is in use: each part has a file that its users lock, shared, for as long as they live.

The kernel lets go of a lock when the last process that has it ends, however that happens; a forked child has its parent's.
The file's modification time says when the part was last used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_PATIENCE_S = 2.0
"""Beyond what moving a part out of its place, or looking whether it is in use, takes."""
_POLL_S = 0.01

_held: dict[Path, int] = {}
"""Descriptors by file, open for as long as the process lives."""


def hold(file: Path) -> bool:
    """Keep what `file` stands for from being removed while this process lives, and note that it is used now.

    `False` if it is gone. Where the file system has no locks, or the cache cannot be written, only what can be done is.
    """
    if not _is(file, _held.get(file)):
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        if not (_locked(descriptor) and _is(file, descriptor)):
            os.close(descriptor)
            return False
        _held[file] = descriptor  # of two threads at once the first's lock stays, too
    with contextlib.suppress(OSError):
        os.utime(file)
    return True


@contextlib.contextmanager
def alone(file: Path) -> Iterator[bool]:
    """Whether no process holds `file`; none can begin to while this lasts. What has no such file is in nobody's use.

    `OSError` where that cannot be known.
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
    """Lock an open file for this process alone, if nobody has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holders(file: Path) -> list[int]:
    """The processes that have locked `file`, as far as the kernel says: of this machine and this PID namespace."""
    try:
        status, locks = file.stat(), Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return []
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    lines = [line.split() for line in locks.splitlines() if " FLOCK " in line]
    return sorted({int(words[4]) for words in lines if words[5] == place and words[4].isdecimal()})


def _locked(descriptor: int) -> bool:
    """Take the shared lock; not while somebody has the file alone for longer than it takes to look."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        except OSError:  # no locks here
            return True


def _is(file: Path, descriptor: int | None) -> bool:
    """Whether the descriptor is open, and of the file that is now at that place."""
    if descriptor is None:
        return False
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False
