"""A JSONL file of dicts that is never read into memory as a whole."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gymgate.core import codec
from gymgate.core.errors import DataError
from gymgate.rollouts.index import LineIndex, line_index
from gymgate.rollouts.row import row_error

_READ = 1 << 20


class RowFile:
    """Rows of a JSONL file by byte offset.

    Iteration streams and needs no index, so the first rows of a large file come at once. `len()` and `numbered_at` use
    an index that is built on first use and cached by path, size and time. Blank lines are skipped. Safe between threads and
    across fork; pickles as its path. A malformed line raises `DataError` with path and line, a file that cannot be read one
    with its path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._opened: tuple[int, LineIndex] | None = None
        if not self.path.is_file():
            raise DataError(f"no file of rows at {str(path)!r}", path=str(path))

    def numbered(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Return each row with its 1-based line, streaming."""
        return ((number, self.parse(line, number)) for number, line in self.lines())

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield each row's bytes with its 1-based line, streaming."""
        with self._readable(), self.path.open("rb", buffering=_READ) as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if not line.isspace())

    def __len__(self) -> int:
        return len(self._index()[1].offsets)

    def numbered_at(self, position: int) -> tuple[int, dict[str, Any]]:
        """Return a row with its 1-based line. Raises `IndexError`, and `DataError` if the file changed."""
        handle, index = self._index()
        count = len(index.offsets)
        if not -count <= position < count:
            raise IndexError(f"row {position} of {count} in {self.path}")
        position %= count
        status = os.fstat(handle)
        if (status.st_size, status.st_mtime_ns) != (index.size, index.mtime_ns):
            raise DataError(
                f"{self.path} changed while it was being read; open it again", path=str(self.path)
            )
        start = index.offsets[position]
        line = index.lines[position]
        with self._readable():
            text = _read_exactly(handle, index.end(position) - start, start)
        return line, self.parse(
            text.partition(b"\n")[0], line
        )  # blank lines follow, also blank for Python alone

    def parse(self, line: bytes, number: int) -> dict[str, Any]:
        """Return the row that a line holds. Raises `DataError`."""
        try:
            return codec.loads_object(line)
        except ValueError as error:
            raise row_error(str(error), str(self.path), number) from error

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Raises `DataError` where the file system refuses."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"cannot read {self.path}: {error.strerror or error}", path=str(self.path)
            ) from error

    def _index(self) -> tuple[int, LineIndex]:
        """Return the file's descriptor and index; opened on first use and kept as long as this object."""
        with self._lock:
            if self._opened is None:
                with self._readable():
                    index = line_index(self.path)
                    handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                weakref.finalize(self, os.close, handle)
                self._opened = handle, index
            return self._opened

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.path,))


def _read_exactly(handle: int, size: int, start: int) -> bytes:
    """Read `size` bytes; `os.pread` may return fewer, at most 2 GiB on Linux."""
    parts, done = [], 0
    while done < size and (part := os.pread(handle, size - done, start + done)):
        parts.append(part)
        done += len(part)
    return b"".join(parts)
