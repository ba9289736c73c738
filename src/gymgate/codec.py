"""JSON at the edges of gymgate: every value that `loads` returns can be written again.

orjson does the work. The standard library takes over for documents that orjson refuses but peers send: lone
surrogates, which CLI agents make by cutting output inside an emoji, and NaN, which some engines emit.
"""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

MAX_DEPTH = 200
"""Levels of nesting that `loads` accepts. orjson writes 254; the rest is for what a record wraps around a body."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY
_LEVELS_LEFT = 254 - MAX_DEPTH


MAX_VALUES = 8 << 20
"""Values in one body from outside: one of two bytes takes up to a hundred in memory."""
_SURELY_FEW = 1 << 20
"""Bytes of a body whose values need no counting."""


class TooLargeError(ValueError):
    """A body of too many values."""


def loads(data: bytes) -> Any:
    """Parse a JSON document.

    Lone surrogates become U+FFFD, so that the value can be encoded; NaN and Infinity stay floats; integers beyond 64 bits
    become floats. Raises `ValueError` for anything that is not JSON and for values nested more than `MAX_DEPTH` levels.
    """
    return parse(data)[0]


def parse(data: bytes) -> tuple[Any, bytes]:
    """As `loads`, with the bytes of exactly this value: `data`, or a new document where something was replaced."""
    try:
        value, lenient = orjson.loads(data), False
    except orjson.JSONDecodeError:
        value, lenient = _loads_leniently(data), True
    if len(data) > 2 * MAX_DEPTH and _is_deep(value):
        raise ValueError(f"nested more than {MAX_DEPTH} levels")
    return value, dumps(value) if lenient else data


def parse_bounded(data: bytes) -> tuple[Any, bytes]:
    """As `parse`; raises `TooLargeError` for more than `MAX_VALUES` values, before it parses them."""
    if len(data) > _SURELY_FEW and data.count(b",") + data.count(b"{") + data.count(b"[") > MAX_VALUES:
        raise TooLargeError(f"holds more than {MAX_VALUES} values")
    return parse(data)


def dumps(value: Any, *, sort_keys: bool = False) -> bytes:
    """Write compact JSON. Lone surrogates become U+FFFD, NaN and infinity null, keys that are numbers text.

    Raises `ValueError` for a value that JSON cannot hold.
    """
    try:
        return orjson.dumps(value, option=_OPTIONS | (orjson.OPT_SORT_KEYS if sort_keys else 0))
    except TypeError:
        pass
    try:
        return json.dumps(
            _cleaned(value), separators=(",", ":"), sort_keys=sort_keys, ensure_ascii=False, allow_nan=False
        ).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except TypeError as error:
        raise ValueError(str(error)) from error


def clean_text(text: str) -> str:
    """The text with lone surrogates replaced by U+FFFD, so that it can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # A pair of surrogates, one escape each, is a character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _loads_leniently(data: bytes) -> Any:
    try:
        return _cleaned(json.loads(data, parse_int=_integer), finite=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _cleaned(value: Any, *, finite: bool = True) -> Any:
    """A copy that JSON can hold, as far as that is possible; `finite`: NaN and infinity become `None`."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {_key(name): _cleaned(item, finite=finite) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item, finite=finite) for item in value]
    if finite and isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _key(name: Any) -> Any:
    if isinstance(name, float) and not math.isfinite(name):
        return "null"
    return clean_text(name) if isinstance(name, str) else name


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else float(digits)


def _is_deep(value: Any) -> bool:
    """Whether orjson could not write the value inside a record. Writing it is faster than counting its brackets."""
    for _ in range(_LEVELS_LEFT):
        value = (value,)
    try:
        orjson.dumps(value)
    except TypeError as error:
        return "ecursion" in str(error)
    return False
