"""The fields that a row must have to be run, and the agent that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymgate.core import codec
from gymgate.core.errors import DataError


def row_json(row: Mapping[str, Any]) -> bytes:
    """Return the row as JSON. Raises `DataError` for a row that no agent can take, or that JSON cannot hold."""
    if lacking := lacking_params(row):
        raise DataError(f"row {lacking}")
    try:
        return codec.dumps(dict(row))
    except ValueError as error:
        raise DataError(f"row cannot be sent as JSON: {error}") from None


def lacking_params(row: Mapping[str, Any]) -> str:
    """Return why no agent can take the row; empty if one can."""
    params = row.get("responses_create_params")
    if params is not None and not isinstance(params, Mapping):
        return f"responses_create_params must be an object, not {type(params).__name__}"
    if params is not None and "input" in params:
        value = params["input"]
        items = [] if value is None or isinstance(value, str) else value
        if isinstance(items, list | tuple) and all(isinstance(item, Mapping) for item in items):
            return ""
        return f"responses_create_params.input must be a text or a list of objects, not {str(value)[:80]!r}"
    lack = "responses_create_params has no input" if params is not None else "has no responses_create_params"
    keys = ", ".join(repr(key) for key in list(row)[:5]) or "nothing"
    return (
        f"{lack}; it looks like raw data ({keys}), to which a prompt must be added first: `gymgate data prepare ENV` "
        f"for the data of an environment or benchmark, with --input FILE --prompt FILE for your own"
    )


def agent_of(row: Mapping[str, Any]) -> str | None:
    """Return the agent that the row names, if any."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, dict) else reference
    return name if isinstance(name, str) and name else None
