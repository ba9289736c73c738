"""Several JSONL files as one, mixed by weight."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gymgate.dataset import blend, make_row
from gymgate.dataset.jsonl import parse_line
from gymgate.dataset.row import row_error
from gymgate.errors import ConfigError, DataError
from gymgate.files import replacing, sha256_of

_FORM = re.compile(r"(?P<path>.+?)(?::(?P<weight>\d*\.?\d+(?:e-?\d+)?)(?::(?P<cap>\d+))?)?", re.IGNORECASE)


class Part(NamedTuple):
    """One file of a blend."""

    path: Path
    weight: float = 1.0
    cap: int | None = None
    """Rows that it gives at most; `None`: all."""


@dataclass
class Blended:
    """What a blend holds."""

    path: Path
    rows: int
    sha256: str
    taken: dict[str, int] = field(default_factory=dict)
    """Rows by file."""
    without_agent: int = 0
    """Rows that name no agent: they run in a stack of one environment only."""


class _Line(NamedTuple):
    source: str
    text: bytes
    agent: str | None


def parse_part(text: str) -> Part:
    """`FILE`, `FILE:WEIGHT` or `FILE:WEIGHT:CAP`. Raises `ConfigError`, `DataError` for a file that is not there."""
    if Path(text).is_file():
        return Part(Path(text))
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r}: write FILE:WEIGHT or FILE:WEIGHT:CAP")
    path = Path(found["path"]).expanduser()
    if not path.is_file():
        raise DataError(f"no file of rows at {str(path)!r}", path=str(path))
    return Part(path, float(found["weight"] or 1.0), int(found["cap"]) if found["cap"] else None)


def blend_files(parts: Sequence[Part], output: Path, *, rows: int | None = None, seed: int = 0) -> Blended:
    """Write a blend of `parts` to `output`, each line as it stands in its file, at most `rows` of them.

    The same files, weights, caps and seed give the same bytes. Streams; `output` appears when it is complete and
    may not be one of the parts. Raises `DataError` with file and line for a row that cannot run.
    """
    if output.exists() and any(output.samefile(part.path) for part in parts):
        raise ConfigError(f"{output} is one of the files to blend; write to another one")
    lines = blend(
        [(_lines(part.path), part.weight) for part in parts], seed=seed, caps=[part.cap for part in parts]
    )
    taken: Counter[str] = Counter({str(part.path): 0 for part in parts})
    without = 0
    with replacing(output) as file:
        for line in itertools.islice(lines, rows):
            file.write(line.text)
            taken[line.source] += 1
            without += line.agent is None
    return Blended(output, taken.total(), sha256_of(output), dict(taken), without)


def _lines(path: Path) -> Iterator[_Line]:
    """Lines that hold a row, each ending in a newline."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.isspace():
                continue
            try:
                data = parse_line(text)
            except ValueError as error:
                raise row_error(str(error), str(path), number) from error
            agent = make_row(data, str(path), number).agent
            yield _Line(str(path), text if text.endswith(b"\n") else text + b"\n", agent)
