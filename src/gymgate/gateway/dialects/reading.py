"""Reads dicts that others wrote: returns a field, or says what was expected."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from gymgate.core import codec
from gymgate.core.config import Dialect
from gymgate.core.errors import ConfigError
from gymgate.core.json_server import error_text, message_in, shortened
from gymgate.gateway.dialects.schema import fault_of_response

Json = dict[str, Any]
_CONTENT: Mapping[Dialect, str] = {"chat": "choices", "responses": "output", "messages": "content"}


def mappings(value: Any, what: str, first: int = 0, stop: int | None = None) -> list[Json]:
    """Return a request's list of objects, those from number `first` to `stop`; `ConfigError` for anything else."""
    if not isinstance(value, list):
        raise ConfigError(f"{what} must be a list, not {shortened(repr(value), 80)}")
    entries = value[first:stop] if first or stop is not None else value
    for index, entry in enumerate(entries, first):
        if not isinstance(entry, dict):
            raise ConfigError(f"{what}[{index}] must be an object, not {shortened(repr(entry), 80)}")
    return entries


def field(value: Mapping[str, Any], name: str, what: str) -> Any:
    """Return a field that a request must have; `ConfigError` without it."""
    if value.get(name) is None:
        raise ConfigError(f"{what} has no {name!r}")
    return value[name]


def metadata_of(body: Mapping[str, Any]) -> Json:
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ConfigError(f"metadata must be an object, not {shortened(repr(metadata), 80)}")
    return metadata


def objects(value: Any) -> list[Json]:
    """Return the objects in a value that should be a list of objects, for reading unchecked data."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def part_of(value: Any, name: str) -> Json:
    """Return an object inside a value that should be an object; empty if either is something else."""
    part = value.get(name) if isinstance(value, dict) else None
    return part if isinstance(part, dict) else {}


def joined_text(parts: Iterable[Any], separator: str = "") -> str:
    """Join the text of content parts; parts without text are left out."""
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return separator.join(text for text in texts if isinstance(text, str) and text)


def without(value: Mapping[str, Any], *names: str) -> Json:
    """Return a copy of an object without some of its fields."""
    return {name: entry for name, entry in value.items() if name not in names}


def without_none(value: Mapping[str, Any]) -> Json:
    return {name: entry for name, entry in value.items() if entry is not None}


def as_text(value: Any) -> str:
    """Return a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else codec.dumps(value).decode()


def canonical_json(text: Any) -> str:
    """Return JSON text independent of white space and the order of keys; other text as it is."""
    try:
        value = codec.loads_own(text.encode()) if isinstance(text, str) else text
        return codec.dumps(value, sort_keys=True).decode()
    except ValueError:
        return str(text)


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def stable_id(prefix: str, *parts: str) -> str:
    """Make an id that depends on `parts` only, so that the same history gives the same request twice."""
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16)
    return f"{prefix}_{digest.hexdigest()}"


def fault_of(answer: Any, dialect: Dialect) -> str | None:
    """Say why `answer` is not an answer in `dialect`, as in "answered with ..."; `None` if it is one.

    An answer without text and tool calls is valid: models do give it, and agents handle it.
    """
    if not isinstance(answer, dict):
        return f"answered with a JSON {type(answer).__name__}, not a JSON object"
    if answer.get("error"):
        return f"answered with an error: {error_text(answer)}"
    if dialect == "responses" and answer.get("status") not in ("completed", "incomplete", None):
        return f"answered with status {answer['status']!r} and no reason"
    name = _CONTENT[dialect]
    parts = answer.get(name)
    if parts is None:
        reason = message_in(answer) or f"it has {', '.join(answer) or 'nothing'}"
        return f"answered without {name!r} ({shortened(reason)})"
    if not _are_objects(parts):
        return f"answered with {name!r} that is no list of objects: {parts!r:.80}"
    if dialect == "responses":
        return fault_of_response(answer)
    return _fault_of_choices(parts) if dialect == "chat" else None


def _fault_of_choices(choices: list[Json]) -> str | None:
    if not choices:
        return "answered with an empty list 'choices'"
    choice, message = choices[0], choices[0].get("message")
    if not isinstance(message, dict):
        return f"answered with a choice without 'message': message is {message!r:.200}"
    if choice.get("finish_reason") == "error":
        return f"answered with finish_reason 'error': {error_text(choice.get('error') or 'no message')}"
    calls = message.get("tool_calls")
    if calls and not _are_objects(calls):
        return f"answered with tool_calls that are no list of objects: {calls!r:.200}"
    for call in calls or ():
        if not isinstance(call.get("id"), str | int | float | None):
            return f"answered with a tool call with an id that is no text: {call['id']!r:.80}"
    return None


def _are_objects(value: Any) -> bool:
    # The first test is the faster one; a callable's answer may hold further kinds of dicts.
    return isinstance(value, list) and (
        {*map(type, value)} <= {dict} or all(isinstance(entry, dict) for entry in value)
    )
