"""One row of work, as its source has it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gymgate.dataset.jsonl import canonical
from gymgate.errors import DataError


@dataclass(frozen=True)
class Row:
    """A row that has `responses_create_params` with `input`; the rest is for the environment."""

    data: dict[str, Any]
    """Verbatim."""
    key: str
    """16 hex digits of its content; the same for equal rows, whatever the source, order of keys or `_ng_*` entries."""
    agent: str | None
    """The agent instance that `agent_ref` names."""
    source: str
    """The file or dataset that it was read from."""
    line: int
    """1-based."""


def make_row(data: dict[str, Any], source: str, line: int) -> Row:
    """Return a validated row. Raises `DataError` with the source and line."""
    params = data.get("responses_create_params")
    if not isinstance(params, Mapping) or "input" not in params:
        raise row_error(_lacks_params(data, params), source, line)
    try:
        key = row_key(data)
    except (TypeError, ValueError) as error:
        raise row_error(f"holds a value that JSON cannot express: {error}", source, line) from error
    return Row(data, key, _agent_name(data, source, line), source, line)


def input_items(params: Mapping[str, Any]) -> list[Any]:
    """Return the items of a request's `input`: messages, calls, their outputs. A text is one message of the user."""
    given = params.get("input")
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given or ())


def row_key(data: Mapping[str, Any]) -> str:
    """Return 16 hex digits of a row's content, without NeMo Gym's own `_ng_*` entries."""
    own = {key: value for key, value in data.items() if not key.startswith("_ng_")}
    return hashlib.sha256(canonical(own)).hexdigest()[:16]


def row_error(reason: str, source: str, line: int) -> DataError:
    """The error `SOURCE:LINE: reason`, with source and line as attributes."""
    return DataError(f"{source}:{line}: {reason}", path=source, line=line)


def _lacks_params(data: Mapping[str, Any], params: Any) -> str:
    if params is not None and not isinstance(params, Mapping):
        return f"responses_create_params must be an object, not {type(params).__name__}"
    lack = "responses_create_params has no input" if params is not None else "has no responses_create_params"
    keys = ", ".join(repr(key) for key in list(data)[:5]) or "nothing"
    return (
        f"{lack}; it looks like raw data ({keys}), to which a prompt must be added first: `gymgate data prepare ENV` "
        f"for the data of an environment or benchmark, with --input FILE --prompt FILE for your own"
    )


def _agent_name(data: Mapping[str, Any], source: str, line: int) -> str | None:
    reference = data.get("agent_ref")
    if reference is None:
        return None
    name = reference.get("name") if isinstance(reference, Mapping) else None
    if not isinstance(name, str) or not name:
        raise row_error(f'agent_ref must be {{"name": AGENT}}, not {str(reference)[:80]!r}', source, line)
    return name
