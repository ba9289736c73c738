"""Rows of figures to JSONL, CSV and Parquet."""

from __future__ import annotations

import csv
import importlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from gymgate.errors import ConfigError, MissingExtraError
from gymgate.files import replacing

FORMATS = (".jsonl", ".csv", ".parquet")


def checked_table(path: Path) -> Path:
    """A file whose ending says its format. Raises `ConfigError`, and `MissingExtraError` for Parquet without pyarrow."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: the ending must be one of {', '.join(FORMATS)}")
    if path.suffix == ".parquet":
        _pyarrow()
    return path


def write_table(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows in the format of the file's ending, whole or not at all. Raises `DataError` if it cannot."""
    listed = list(rows)
    if path.suffix == ".parquet":
        content = _parquet(listed)
    elif path.suffix == ".csv":
        content = _csv(listed)
    else:
        content = b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in listed)
    with replacing(path) as file:
        file.write(content)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every name, in the order in which they turn up in the longest row first."""
    names: dict[str, None] = {}
    for row in sorted(rows, key=len, reverse=True):
        names.update(dict.fromkeys(row))
    return list(names)


def _csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns_of(rows), restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return orjson.dumps(value).decode() if isinstance(value, list | dict) else value


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    arrow, parquet = _pyarrow()
    names = columns_of(rows)
    table = arrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError("Parquet needs pyarrow: pip install 'gymgate[parquet]'") from error
