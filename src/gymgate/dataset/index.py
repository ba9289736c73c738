"""Where each row of a JSONL file starts: an array of 64-bit offsets, built once, kept in the cache, mapped."""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gymgate.config import cache_dir

_MAGIC = b"gymgate1" if sys.byteorder == "little" else b"gymgate2"
_HEADER = 8
"""Words before the offsets: magic, size, mtime in ns, rows, whether line numbers follow, three spare."""
_FLUSH = 1 << 16
"""Offsets held in memory while building."""
_READ = 1 << 20


@dataclass(frozen=True)
class LineIndex:
    """Rows of one file in one state; `size` and `mtime_ns` name that state."""

    size: int
    mtime_ns: int
    offsets: Sequence[int]
    """Of each row's first byte."""
    lines: Sequence[int] | None
    """1-based line of each row; `None` where no line is blank, so that it is its position plus one."""

    def line(self, position: int) -> int:
        """1-based line number of a row."""
        return position + 1 if self.lines is None else self.lines[position]

    def end(self, position: int) -> int:
        """Offset behind a row; blank lines may come before it."""
        return self.offsets[position + 1] if position + 1 < len(self.offsets) else self.size


def line_index(path: Path) -> LineIndex:
    """The index of a file, from the cache or built now; a cache that cannot be written is done without.

    Safe with concurrent readers and builders: an index appears whole or not at all.
    """
    status = path.stat()
    kept = cache_dir() / "rows" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:24]}.index"
    index = _open(kept, status)
    if index is None:
        index = _build(path, kept, status)
    return index


def _open(kept: Path, status: os.stat_result) -> LineIndex | None:
    """The kept index, if it is of the file's present state and complete."""
    try:
        with kept.open("rb") as file:
            words = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).cast("Q")
    except (OSError, ValueError, TypeError):
        return None
    head = words[:_HEADER].tolist() if len(words) >= _HEADER else []
    if not head or head[:3] != [_word(_MAGIC), status.st_size, status.st_mtime_ns]:
        return None
    rows, numbered = head[3], head[4]
    if len(words) != _HEADER + rows * (1 + numbered):
        return None
    offsets = words[_HEADER : _HEADER + rows]
    return LineIndex(
        status.st_size, status.st_mtime_ns, offsets, words[_HEADER + rows :] if numbered else None
    )


def _build(path: Path, kept: Path, status: os.stat_result) -> LineIndex:
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=kept.parent, prefix=kept.stem)
    except OSError:
        return _build_in_memory(path, status)
    try:
        with os.fdopen(handle, "w+b") as out:
            _write(path, out, status)
        Path(name).replace(kept)
    except OSError:
        Path(name).unlink(missing_ok=True)
        return _build_in_memory(path, status)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return _open(kept, status) or _build_in_memory(path, status)


def _write(path: Path, out: BinaryIO, status: os.stat_result) -> None:
    """Offsets go to `out` as they are found; line numbers to a scratch file, kept only if a line is blank."""
    out.write(bytes(8 * _HEADER))
    rows, blanks = 0, False
    with tempfile.TemporaryFile(dir=Path(out.name).parent if isinstance(out.name, str) else None) as scratch:
        for offsets, lines in _batches(path, status.st_size):
            out.write(offsets)
            scratch.write(lines)
            rows += len(offsets)
            blanks = blanks or (bool(lines) and lines[-1] != rows)
        if blanks:
            scratch.seek(0)
            while chunk := scratch.read(_READ):
                out.write(chunk)
    out.seek(0)
    head = [_word(_MAGIC), status.st_size, status.st_mtime_ns, rows, int(blanks), 0, 0, 0]
    out.write(array("Q", head))


def _build_in_memory(path: Path, status: os.stat_result) -> LineIndex:
    offsets, lines = array("Q"), array("Q")
    for some_offsets, some_lines in _batches(path, status.st_size):
        offsets += some_offsets
        lines += some_lines
    blanks = bool(lines) and lines[-1] != len(lines)
    return LineIndex(status.st_size, status.st_mtime_ns, offsets, lines if blanks else None)


def _batches(path: Path, size: int) -> Iterator[tuple[array[int], array[int]]]:
    """Offsets and line numbers of the lines that are not blank, up to `size`, some at a time."""
    offsets, lines, position = array("Q"), array("Q"), 0
    with path.open("rb", buffering=_READ) as file:
        for number, line in enumerate(file, 1):
            if position >= size:
                break
            if not line.isspace():
                offsets.append(position)
                lines.append(number)
            position += len(line)
            if len(offsets) >= _FLUSH:
                yield offsets, lines
                offsets, lines = array("Q"), array("Q")
    yield offsets, lines


def _word(magic: bytes) -> int:
    return int.from_bytes(magic, sys.byteorder)
