"""What a row must contain to be run, and the agent that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymgate import codec
from gymgate.errors import DataError


def row_json(row: Mapping[str, Any]) -> bytes:
    """Return the row as JSON. Raises `DataError` for a row that no agent can take, or that JSON cannot hold."""
    check_row(row)
    try:
        return codec.dumps(dict(row))
    except ValueError as error:
        raise DataError(f"row cannot be sent as JSON: {error}") from None


def check_row(row: Mapping[str, Any]) -> None:
    """Raise `DataError` for a row that no agent can take."""
    params = row.get("responses_create_params")
    if not isinstance(params, dict):
        raise DataError(
            "row has no responses_create_params (an object with input); benchmarks' raw rows need preparing first"
        )
    if "input" not in params:
        raise DataError("row's responses_create_params has no input")


def agent_of(row: Mapping[str, Any]) -> str | None:
    """Return the agent that the row names, if any."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, dict) else reference
    return name if isinstance(name, str) and name else None
