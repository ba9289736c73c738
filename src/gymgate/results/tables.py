"""Rows of metrics and rollouts to JSONL, CSV and Parquet files."""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gymgate.core import codec
from gymgate.core.errors import ConfigError, MissingExtraError
from gymgate.core.extras import install_command
from gymgate.core.files import replacing

FORMATS = (".jsonl", ".csv", ".parquet")
BATCH = 1000
_FORMULA = re.compile(r"[=@\t\r\n\uff1d\uff20\uff0b\uff0d]|[+-](?![\d.]+$)")
"""The beginning of a text that a spreadsheet takes for a formula, in some languages also with wide signs; a number is none."""
Rows = Iterable[Mapping[str, Any]]
Schema = Callable[[Any], Any]
"""From the `pyarrow` module to a schema."""


def checked_table(path: Path, formats: Sequence[str] = FORMATS) -> Path:
    """Raises `ConfigError` for another ending, and `MissingExtraError` for Parquet without pyarrow."""
    if path.suffix not in formats:
        raise ConfigError(f"{path}: the ending must be one of {', '.join(formats)}")
    if path.suffix == ".parquet":
        _pyarrow()
    return path


def write_table(path: Path, rows: Rows, schema: Schema | None = None) -> int:
    """Write rows in the format of the file's ending, whole or not at all; how many.

    JSONL is streamed, and so is Parquet with a `schema`. Raises `DataError` if the file cannot be written.
    """
    with replacing(path) as file:
        if path.suffix == ".parquet":
            return _write_parquet(file, rows, schema)
        if path.suffix == ".csv":
            return _write_csv(file, list(rows))
        return sum(file.write(codec.dumps(row) + b"\n") > 0 for row in rows)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every name, in the order of the longest row first."""
    names: dict[str, None] = {}
    for row in sorted(rows, key=len, reverse=True):
        names.update(dict.fromkeys(row))
    return list(names)


def _write_csv(file: IO[bytes], rows: Sequence[Mapping[str, Any]]) -> int:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    names = columns_of(rows)
    plain = csv.writer(text, lineterminator="\n")
    # Before Python 3.13 that quotes no carriage return, at which readers end a line.
    quoting = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for cells in ([*map(_cell, names)], *([_cell(row.get(name)) for name in names] for row in rows)):
        has_return = any(isinstance(cell, str) and "\r" in cell for cell in cells)
        (quoting if has_return else plain).writerow(cells)
    text.detach()
    return len(rows)


def _cell(value: Any) -> Any:
    """Return what stands in the file: a text that begins a formula with a `'` in front, so that no spreadsheet runs it."""
    if value is None:
        return ""
    cell = codec.dumps(value).decode() if isinstance(value, list | dict) else value
    return f"'{cell}" if isinstance(cell, str) and _FORMULA.match(cell) else cell


def _write_parquet(file: IO[bytes], rows: Rows, schema: Schema | None) -> int:
    arrow, parquet = _pyarrow()
    if schema is None:
        listed = list(rows)
        names = columns_of(listed)
        rows = [{name: row.get(name) for name in names} for row in listed]
        parquet.write_table(arrow.Table.from_pylist(rows), file)
        return len(listed)
    count, pending, fixed = 0, iter(rows), schema(arrow)
    with parquet.ParquetWriter(file, fixed) as writer:
        while batch := list(itertools.islice(pending, BATCH)):
            writer.write_table(arrow.Table.from_pylist(batch, schema=fixed))
            count += len(batch)
    return count


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError(f"Parquet needs pyarrow: {install_command('parquet')}") from error
