"""Where each row of a JSONL file starts: built once, kept in the cache, and mapped into memory."""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gymgate.core.config import cache_dir
from gymgate.core.errors import DataError
from gymgate.core.files import replacing

_MAGIC = int.from_bytes(b"gymgate3", sys.byteorder)
_HEADER = 4
"""64-bit words before the rows: magic, size of the file, its mtime in ns, rows."""
_FLUSH = 1 << 17
"""Words held in memory while building."""
_READ = 1 << 20


@dataclass(frozen=True)
class LineIndex:
    """The rows of one file in one state; `size` and `mtime_ns` identify that state."""

    size: int
    mtime_ns: int
    offsets: Sequence[int]
    """Offset of each row's first byte."""
    lines: Sequence[int]
    """1-based line of each row; blank lines are no rows."""

    def end(self, position: int) -> int:
        """Return the offset behind a row and the blank lines that follow it."""
        return self.offsets[position + 1] if position + 1 < len(self.offsets) else self.size


def line_index(path: Path) -> LineIndex:
    """Return the index of a file, from the cache or built now; in memory if the cache cannot be written.

    Safe with concurrent readers and builders: an index appears whole or not at all.
    """
    status = path.stat()
    file = cache_dir() / "rows" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]}.index"
    if (index := _open(file, status)) is not None:
        return index
    try:
        with replacing(file) as out:
            out.write(bytes(8 * _HEADER))
            words = 0
            for batch in _batches(path, status.st_size):
                out.write(batch)
                words += len(batch)
            out.seek(0)
            out.write(array("Q", [_MAGIC, status.st_size, status.st_mtime_ns, words // 2]))
    except DataError:
        return _build(path, status)
    return _open(file, status) or _build(path, status)


def _open(stored: Path, status: os.stat_result) -> LineIndex | None:
    """Open the stored index, if it is complete and the file has not changed since."""
    try:
        with stored.open("rb") as file:
            words = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast("Q")
    except (OSError, ValueError, TypeError):
        return None
    head = words[:_HEADER].tolist()
    if head[:3] != [_MAGIC, status.st_size, status.st_mtime_ns] or len(words) != _HEADER + 2 * head[3]:
        return None
    return _index(words[_HEADER:], status)


def _build(path: Path, status: os.stat_result) -> LineIndex:
    """Build the index in memory."""
    words = array("Q")
    for batch in _batches(path, status.st_size):
        words += batch
    return _index(memoryview(words), status)


def _index(words: memoryview[int], status: os.stat_result) -> LineIndex:
    return LineIndex(status.st_size, status.st_mtime_ns, words[::2], words[1::2])


def _batches(path: Path, size: int) -> Iterator[array[int]]:
    """Offset and line number of each line that is not blank, in turn, up to `size`; some rows at a time."""
    words, position = array("Q"), 0
    with path.open("rb", buffering=_READ) as file:
        for number, line in enumerate(file, 1):
            if position >= size:
                break
            if not line.isspace():
                words.extend((position, number))
            position += len(line)
            if len(words) >= _FLUSH:
                yield words
                words = array("Q")
    yield words
