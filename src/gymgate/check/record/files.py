"""Records on disk: a file for each, and those that ship with gymgate."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path

import orjson
from pydantic import ValidationError

from gymgate.check.record.record import QualityRecord
from gymgate.errors import DataError
from gymgate.files import replacing

SHIPPED = "records.jsonl"


def record_path(target: Path, name: str) -> Path:
    """The file of a record: `target` itself if it is called `*.json`, else a file in that directory."""
    return target if target.suffix == ".json" else target / f"{name}.json"


def load_record(path: Path) -> QualityRecord | None:
    """Read a record; `None` if there is no file. Raises `DataError` for any other file."""
    if not path.exists():
        return None
    try:
        return QualityRecord.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error
    except ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise DataError(f"{path} holds no record of gymgate check: {reason}", path=str(path)) from error


def save_record(path: Path, record: QualityRecord) -> None:
    """Write a record. The file is replaced whole or not at all."""
    with replacing(path) as file:
        file.write(orjson.dumps(record.model_dump(mode="json"), option=orjson.OPT_INDENT_2) + b"\n")


def packed(records: Iterable[QualityRecord]) -> bytes:
    """Records as they ship: one a line, without what is unset and without options."""
    ordered = sorted(records, key=lambda record: record.name)
    dumped = (
        record.model_dump(mode="json", exclude={"settings"}, exclude_defaults=True) for record in ordered
    )
    return b"".join(orjson.dumps(each, option=orjson.OPT_APPEND_NEWLINE) for each in dumped)


def shipped_record(kind: str, environment: str, version: str) -> QualityRecord | None:
    """The record that ships for an environment of a release."""
    name = f"{kind}/{environment}-{version}"
    return next((record for record in shipped_records() if record.name == name), None)


@cache
def shipped_records() -> tuple[QualityRecord, ...]:
    """The records in the package, in the order of their names."""
    lines = (resources.files("gymgate.check.record") / SHIPPED).read_bytes().splitlines()
    return tuple(QualityRecord.model_validate_json(line) for line in lines)
