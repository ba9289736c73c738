"""JSON on the hot path: orjson, with the standard library for what orjson refuses but peers send."""

from __future__ import annotations

import json
from typing import Any

import orjson


def loads(data: bytes) -> Any:
    """The value of a JSON document; `ValueError` if it is not one.

    Lone surrogates and NaN, which some engines emit, are accepted.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return json.loads(data)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def dumps(value: Any, *, sort_keys: bool = False) -> bytes:
    """As compact JSON; `TypeError` for a value that JSON cannot hold."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError:
        return json.dumps(value, separators=(",", ":"), sort_keys=sort_keys).encode()
