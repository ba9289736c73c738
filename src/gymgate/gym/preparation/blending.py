"""Several JSONL files as one, mixed by weight."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gymgate.core.errors import ConfigError, DataError
from gymgate.core.files import replacing, sha256_of
from gymgate.rollouts import RowFile, blend, make_row

_FORM = re.compile(r"(?P<path>.+?)(?::(?P<weight>\d*\.?\d+(?:e-?\d+)?)(?::(?P<cap>\d+))?)?", re.IGNORECASE)


class BlendFile(NamedTuple):
    """One file of a blend."""

    path: Path
    weight: float = 1.0
    cap: int | None = None
    """Rows to take at most; `None`: all."""


@dataclass
class BlendResult:
    """A blend that was written."""

    path: Path
    rows: int
    sha256: str
    taken: dict[str, int]
    """Rows by file."""
    without_agent: int
    """Rows that name no agent: they run only in a stack of one environment."""


class _Line(NamedTuple):
    source: str
    text: bytes
    agent: str | None


def parse_blend_file(text: str) -> BlendFile:
    """`FILE`, `FILE:WEIGHT` or `FILE:WEIGHT:CAP`. Raises `ConfigError`; `DataError` if there is no such file."""
    if Path(text).is_file():
        return BlendFile(Path(text))
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r}: write FILE:WEIGHT or FILE:WEIGHT:CAP")
    path = Path(match["path"]).expanduser()
    if not path.is_file():
        raise DataError(
            f"no file of rows at {str(path)!r} (write FILE, FILE:WEIGHT or FILE:WEIGHT:CAP)", path=str(path)
        )
    return BlendFile(path, float(match["weight"] or 1.0), int(match["cap"]) if match["cap"] else None)


def blend_files(
    files: Sequence[BlendFile], output: Path, *, rows: int | None = None, seed: int = 0
) -> BlendResult:
    """Write a blend of files to `output`, each line as it stands in its file, at most `rows` of them.

    The same files, weights, caps and seed give the same bytes. Streams; `output` appears when it is complete and
    may not be one of the files. Raises `DataError` with file and line for a row that cannot run.
    """
    if output.exists() and any(output.samefile(file.path) for file in files):
        raise ConfigError(f"{output} is one of the files to blend; write to another one")
    weighted = [(_lines(file.path), file.weight) for file in files]
    lines = blend(weighted, seed=seed, caps=[file.cap for file in files])
    taken: Counter[str] = Counter({str(file.path): 0 for file in files})
    without_agent = 0
    with replacing(output) as out:
        for line in itertools.islice(lines, rows):
            out.write(line.text)
            taken[line.source] += 1
            without_agent += line.agent is None
    return BlendResult(output, taken.total(), sha256_of(output), dict(taken), without_agent)


def _lines(path: Path) -> Iterator[_Line]:
    """Lines that hold a row, each ending in a newline."""
    file = RowFile(path)
    for number, text in file.lines():
        agent = make_row(file.parse(text, number), str(path), number).agent
        yield _Line(str(path), text if text.endswith(b"\n") else text + b"\n", agent)
