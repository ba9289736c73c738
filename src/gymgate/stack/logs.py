"""The logs of a running stack: kept short, so that a long training does not fill their disk, or memory; and read."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

MAX_LOG = 8 << 20
"""Bytes of one file. A longer one loses its beginning."""
KEPT = 2 << 20
"""Bytes at its end that stay."""
CHECK_S = 10.0
"""Between looks at the sizes. A server that writes 100 MB a second is a gigabyte over the limit by then."""
_HEAD = 64
"""Bytes by which a reader sees that the file was cut: the line about what was dropped, or another first line."""
_DROPPED = re.compile(rb"^\[(\d+) bytes were dropped here\]\n", re.MULTILINE)

logger = logging.getLogger(__name__)


async def keep_short(directory: Path) -> None:
    """Cut the logs of a stack in `directory` whenever they grow beyond `MAX_LOG`, until cancelled."""
    while True:
        await asyncio.sleep(CHECK_S)
        try:
            await asyncio.to_thread(cut_logs, directory)
        except OSError as error:
            logger.warning("cannot cut the logs in %s: %s", directory, error)


def cut_logs(directory: Path) -> None:
    """Leave the end of each log that is too long. Its writers append, and so continue behind that."""
    for path in log_files(directory):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > MAX_LOG:
                _cut(path)


def log_files(directory: Path) -> list[Path]:
    """Return the logs of a stack in `directory`: the daemon's, the fork servers', and those of each environment's servers."""
    return sorted(directory.glob("*.log")) + sorted(directory.glob("logs/*/*.log"))


def named_logs(directory: Path) -> dict[str, Path]:
    """Return a stack's logs by server; the environment precedes a name that two environments have."""
    paths = log_files(directory)
    names = Counter(path.stem for path in paths)
    return {path.stem if names[path.stem] == 1 else f"{path.parent.name}/{path.stem}": path for path in paths}


class LogReader:
    """Reads the lines of a log as they come, each once, also when `cut_logs` cuts it meanwhile."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError`."""
        self._file = path.open("rb", buffering=0)
        self._head = b""
        """The first bytes of the file, which change when it is cut."""
        self._partial = b""

    def lines(self) -> list[bytes]:
        """Return the whole lines that have been written since the last call."""
        with _locked(self._file, fcntl.LOCK_SH):
            return self._lines()

    def _lines(self) -> list[bytes]:
        head = os.pread(self._file.fileno(), _HEAD, 0)
        if not head.startswith(self._head):
            if not head:  # somebody else emptied the file
                return []
            self._file.seek(self._after_cut())
        self._head = head
        *whole, self._partial = (self._partial + self._file.read()).split(b"\n")
        return whole

    def rest(self) -> list[bytes]:
        """Return all that is left, with a last line that has no end."""
        lines = [*self.lines(), self._partial]
        self._partial = b""
        return lines if lines[-1] else lines[:-1]

    def is_of(self, path: Path) -> bool:
        """Whether `path` is still the file that is read here, and not another one that took its name."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _after_cut(self) -> int:
        """Return where to go on: at what has not been read yet, else where bytes are missing that nobody has read."""
        match = _DROPPED.search(os.pread(self._file.fileno(), 1 << 16, 0))
        if match is not None and (read := self._file.tell() - int(match[1])) >= 0:
            return match.end() + read
        if self._partial:  # its end is lost
            self._partial += b"\n"
        return 0 if match is None else match.start()  # without: somebody else emptied the file


def _cut(path: Path) -> None:
    """Move the end of a log to its beginning and cut what is behind it.

    What is written meanwhile is moved too, until nothing is left: only a line that comes between the last look and the cut
    itself, which follow each other at once, is lost. Emptying the file first would put such lines before the end that stays.
    """
    with path.open("r+b", buffering=0) as file, _locked(file, fcntl.LOCK_EX):
        dropped = file.seek(-KEPT, os.SEEK_END)
        end = file.read(KEPT)
        dropped += end.find(b"\n") + 1 or len(end)
        size = os.pwrite(file.fileno(), b"[%d bytes were dropped here]\n" % dropped, 0)
        file.seek(dropped)
        while more := file.read(KEPT):
            size += os.pwrite(file.fileno(), more, size)
        os.ftruncate(file.fileno(), size)


@contextlib.contextmanager
def _locked(file: IO[Any], how: int) -> Iterator[None]:
    """Hold a lock on a log, so that nobody reads it while it is cut."""
    fcntl.flock(file, how)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
