"""One row of work, as its source has it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.errors import DataError
from gymgate.rollouts.row_fields import agent_of, flat_row, lacking_params


class TaskKey(NamedTuple):
    """Identifies a task: what the rollouts of one row have in common, wherever the row stands in its file."""

    environment: str
    row_key: str
    """16 hex digits of the row's content."""
    occurrence: int
    """Number of equal rows before this one in the input."""

    def __str__(self) -> str:
        copy = f"#{self.occurrence + 1}" if self.occurrence else ""
        return f"{self.environment}/{self.row_key}{copy}"


@dataclass(frozen=True)
class Row:
    """A row that has `responses_create_params` with `input`; the rest is for the environment."""

    data: dict[str, Any]
    """As its source has it; flat if NeMo Gym materialised it."""
    key: str
    """16 hex digits of its content; the same for equal rows, whatever the source, order of keys or `_ng_*` entries."""
    agent: str | None
    """The agent that `agent_ref` names, else the environment server that `_ng_environment_server` names."""
    source: str
    """The file or dataset that it was read from."""
    line: int
    """1-based."""


def make_row(data: dict[str, Any], source: str, line: int) -> Row:
    """Return a validated row. Raises `DataError` with the source and line."""
    if not isinstance(data, Mapping):
        raise row_error(f"is not a mapping, but {type(data).__name__}", source, line)
    if (flat := flat_row(data)) is not data:
        data = dict(flat)
    if lacking := lacking_params(data):
        raise row_error(lacking, source, line)
    try:
        key = row_key(data)
    except (TypeError, ValueError) as error:
        raise row_error(f"holds a value that JSON cannot express: {error}", source, line) from error
    return Row(data, key, _agent_name(data, source, line), source, line)


def input_items(params: Mapping[str, Any]) -> list[Any]:
    """Return the items of a request's `input`: messages, calls, their outputs. A text is one message of the user."""
    value = params.get("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return list(value) if isinstance(value, list | tuple) else []


def row_key(data: Mapping[str, Any]) -> str:
    """Return 16 hex digits of a row's content, without NeMo Gym's own `_ng_*` entries."""
    own = {key: value for key, value in data.items() if not key.startswith("_ng_")}
    return hashlib.sha256(codec.dumps(own, sort_keys=True)).hexdigest()[:16]


def row_error(reason: str, source: str, line: int) -> DataError:
    """The error `SOURCE:LINE: reason`, with source and line as attributes."""
    return DataError(f"{source}:{line}: {reason}", path=source, line=line)


def _agent_name(data: Mapping[str, Any], source: str, line: int) -> str | None:
    reference, agent = data.get("agent_ref"), agent_of(data)
    if reference is not None and not (isinstance(reference, Mapping) and agent):
        raise row_error(f'agent_ref must be {{"name": AGENT}}, not {str(reference)[:80]!r}', source, line)
    return agent
