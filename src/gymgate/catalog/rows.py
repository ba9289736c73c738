"""What a JSONL file holds, told from its first row."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import orjson

RowsKind = Literal["rows", "raw", "rollouts", "other"]


def count_rows(path: Path) -> int:
    """Lines that are not blank."""
    with path.open("rb") as file:
        return sum(1 for line in file if not line.isspace())


def kind_of_file(path: Path) -> RowsKind:
    """By the first line that is not blank; `other` where that is no JSON object."""
    try:
        with path.open("rb") as file:
            first = next((line for line in file if not line.isspace()), b"")
        return kind_of_row(orjson.loads(first))
    except (OSError, orjson.JSONDecodeError):
        return "other"


def kind_of_row(row: Any) -> RowsKind:
    """rows: has `responses_create_params.input`; rollouts: and a `response`; raw: any other task-like object."""
    if not isinstance(row, dict):
        return "other"
    params = row.get("responses_create_params")
    if isinstance(params, dict) and "input" in params:
        return "rollouts" if isinstance(row.get("response"), dict) else "rows"
    return "other" if any("reward" in key for key in row) else "raw"
