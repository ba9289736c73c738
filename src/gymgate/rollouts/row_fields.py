"""The fields that a row must have to be run, what runs it, and the flat form of one that NeMo Gym materialised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.errors import DataError

TASK_ID, ENVIRONMENT_SERVER = "_ng_task_id", "_ng_environment_server"
"""NeMo Gym's entries for the task that a row was made of, `{"taskset": ..., "task_id": ...}`, and for the environment server that
runs it."""


def flat_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row that NeMo Gym has materialised (`task_id`, `task_input`) with its fields at the top, and its task's identity
    in `_ng_task_id`. Any other row comes back as it is.
    """
    task, fields = row.get("task_id"), row.get("task_input")
    if not isinstance(task, Mapping) or not isinstance(fields, Mapping):
        return row
    rest = {name: value for name, value in row.items() if name not in ("task_id", "task_input")}
    return {**fields, **rest, TASK_ID: task}


class SentRow(NamedTuple):
    """A row as it goes to the daemon, and what it says of where it is to be run."""

    body: bytes
    """The flat row as JSON."""
    agent: str | None
    """The agent or else the environment server that it names."""
    environment_server: str | None
    taskset: str | None
    """The taskset that it was materialised for."""


def sent_row(row: Mapping[str, Any]) -> SentRow:
    """Read a row that is to be run. Raises `DataError` for one that no agent can take, or that JSON cannot hold."""
    flat = flat_row(row)
    if lacking := lacking_params(flat):
        raise DataError(f"row {lacking}")
    try:
        body = codec.dumps(dict(flat))
    except ValueError as error:
        raise DataError(f"row cannot be sent as JSON: {error}") from None
    task = flat.get(TASK_ID)
    taskset = _name(task.get("taskset")) if isinstance(task, Mapping) else None
    return SentRow(body, agent_of(row), environment_server_of(row), taskset)


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
    if "row_key" in row and "repeat" in row:
        return (
            "is a rollout that `gymgate run -o DIR` kept, not a row: `gymgate report DIR` shows the rollouts, `gymgate rescore "
            f"DIR` scores them again, --replay-file FILE replays them. Its row is {row.get('source')}:{row.get('line')}"
        )
    lack = "responses_create_params has no input" if params is not None else "has no responses_create_params"
    keys = ", ".join(repr(key) for key in list(row)[:5]) or "nothing"
    return (
        f"{lack}; it looks like raw data ({keys}), to which a prompt must be added first: `gymgate data prepare ENV` "
        f"for the data of an environment or benchmark, with --input FILE --prompt FILE for your own"
    )


def agent_of(row: Mapping[str, Any]) -> str | None:
    """Return the agent or else the environment server that a row or a result of NeMo Gym names, if any."""
    reference = row.get("agent_ref")
    agent = reference.get("name") if isinstance(reference, dict) else reference
    return _name(agent) or environment_server_of(row)


def environment_server_of(row: Mapping[str, Any]) -> str | None:
    """Return the environment server that a row names, if any."""
    return _name(row.get(ENVIRONMENT_SERVER))


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
