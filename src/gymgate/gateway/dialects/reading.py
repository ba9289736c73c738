"""Reads dicts that others wrote: returns a field, or raises an error that says what was expected."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from gymgate import codec
from gymgate.errors import ConfigError, PolicyError

Json = dict[str, Any]


def mappings(value: Any, what: str) -> list[Json]:
    """Return a request's list of objects; `ConfigError` for anything else."""
    if not isinstance(value, list):
        raise ConfigError(f"{what} must be a list, not {_shown(value)}")
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise ConfigError(f"{what}[{index}] must be an object, not {_shown(entry)}")
    return value


def field(value: Mapping[str, Any], name: str, what: str) -> Any:
    """Return a field that a request must have; `ConfigError` without it."""
    if value.get(name) is None:
        raise ConfigError(f"{what} has no {name!r}")
    return value[name]


def metadata_of(body: Mapping[str, Any]) -> Json:
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ConfigError(f"metadata must be an object, not {_shown(metadata)}")
    return metadata


def answer_list(answer: Mapping[str, Any], name: str, what: str) -> list[Json]:
    """Return a list of objects that an endpoint's answer must have; `PolicyError` without it."""
    value = answer.get(name)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise PolicyError(
            f"the endpoint's answer is not a {what}: {name!r} is {_shown(value)}; {_summary(answer)}"
        )
    return value


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


def without_none(value: Mapping[str, Any]) -> Json:
    return {name: entry for name, entry in value.items() if entry is not None}


def as_text(value: Any) -> str:
    """Return a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else codec.dumps(value).decode()


def canonical_json(text: Any) -> str:
    """Return JSON text independent of white space and the order of keys; other text as it is."""
    try:
        value = orjson.loads(text) if isinstance(text, str) else text
        return codec.dumps(value, sort_keys=True).decode()
    except ValueError:
        return str(text)


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def stable_id(prefix: str, *parts: str) -> str:
    """Make an id that depends on `parts` only, so that the same history gives the same request twice."""
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=16)
    return f"{prefix}_{digest.hexdigest()}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _summary(answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    if message is None:
        message = answer.get("message")
    return (
        f"it says {_shown(message)}" if message else f"its fields are {', '.join(sorted(answer)) or 'none'}"
    )
