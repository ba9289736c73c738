"""Records on disk: a file for each, and those that ship with gymgate."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gymgate.core import codec
from gymgate.core.config import validation_message
from gymgate.core.errors import ConfigError, DataError
from gymgate.core.files import replacing
from gymgate.quality.model import CheckRequest, CheckResult

SHIPPED = "records.jsonl"
DIFFERENCES = 5
"""Rollouts whose reward differs that ship with a record."""


def record_path(directory: Path, name: str) -> Path:
    """The file of a record: `KIND/ENVIRONMENT-RELEASE.json`."""
    return directory / f"{name}.json"


def load_record(path: Path) -> CheckResult | None:
    """Read a record; `None` if there is no file. Raises `DataError` for any other file."""
    if not path.exists():
        return None
    try:
        return CheckResult.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error
    except ValidationError as error:
        message = f"{path} holds no record of gymgate check: {validation_message(error)}"
        raise DataError(message, path=str(path)) from error


def save_record(path: Path, record: CheckResult) -> None:
    """Write a record. The file is replaced whole or not at all."""
    with replacing(path) as file:
        file.write(codec.dumps(record.model_dump(mode="json"), indent=True) + b"\n")


def finished_records(requests: Iterable[CheckRequest], directory: Path) -> dict[str, CheckResult]:
    """Return the records of packaged environments that have the same settings and did not fail, by the request's name.

    Raises `ConfigError` for two configs of the user that would have one record, `DataError` for a file that is none.
    """
    own: dict[str, str] = {}
    records: dict[str, CheckResult] = {}
    for request in requests:
        kind, name = request.kind_and_name
        if kind == "config":
            if (other := own.setdefault(name, request.name)) != request.name:
                raise ConfigError(f"{other} and {request.name} would have one record; check one at a time")
            continue
        record = load_record(record_path(directory, request.record_name))
        if record is not None and record.settings == request.settings and record.verdict != "failed":
            records[request.name] = record
    return records


def records_to_extend(requests: Iterable[CheckRequest], directory: Path) -> dict[str, CheckResult]:
    """Return the records that sections are added to, by the request's name: those in `directory`, else those that ship."""
    records: dict[str, CheckResult] = {}
    for request in requests:
        record = load_record(record_path(directory, request.record_name))
        record = record or shipped_record(*request.kind_and_name, request.stack.runtime.version)
        if record is not None and record.verdict != "failed":
            records[request.name] = record
    return records


def pack_records(records: Iterable[CheckResult]) -> bytes:
    """Records as they ship: one a line, without what is unset, options, and the rollouts that did not differ."""
    ordered = sorted(records, key=lambda record: record.name)
    return b"".join(codec.dumps(_shipped_form(record)) + b"\n" for record in ordered)


def _shipped_form(record: CheckResult) -> dict[str, Any]:
    differing = [row for row in record.rows if row.verdict == "differs" and row.recorded is not None]
    shipped = record.model_copy(
        update={"rows": tuple(differing[:DIFFERENCES]), "settings": "", "traceback": ""}
    )
    return shipped.model_dump(mode="json", exclude_defaults=True)


def shipped_record(kind: str, environment: str, version: str) -> CheckResult | None:
    """The record that ships for an environment of a release."""
    name = f"{kind}/{environment}-{version}"
    return next((record for record in shipped_records() if record.name == name), None)


@cache
def shipped_records() -> tuple[CheckResult, ...]:
    """The records in the package, in the order of their names."""
    lines = (resources.files("gymgate.quality.record") / SHIPPED).read_bytes().splitlines()
    return tuple(CheckResult.model_validate_json(line) for line in lines)
