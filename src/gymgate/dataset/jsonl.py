"""One line of JSONL to a dict and back to canonical bytes, exactly: no number changes on the way."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

_LONG_NUMBER = re.compile(rb"[0-9]{19}")


def parse_line(line: bytes) -> dict[str, Any]:
    """A JSON object. Raises `ValueError` with one line of reason.

    orjson turns integers beyond 64 bits into floats and refuses NaN, which Python's writer emits; the standard
    parser takes over for those.
    """
    try:
        value = json.loads(line) if _LONG_NUMBER.search(line) else orjson.loads(line)
    except (ValueError, RecursionError):
        value = _parse_slowly(line)
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object, not {type(value).__name__}")
    return value


def _parse_slowly(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {' '.join(str(reason).split())}") from error


def canonical(value: Any) -> bytes:
    """Equal values give equal bytes, whatever the order of their keys."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
