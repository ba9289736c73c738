"""JSON at the edges of gymgate: every value that `loads` returns can be written again, and no number changes on the way.

orjson does the work. The standard library takes over for documents that orjson refuses but peers send: lone
surrogates, which CLI agents make by cutting output inside an emoji, and NaN, which some engines emit. It also reads
integers beyond 64 bits, which orjson would turn into floats.

Not for the pipes to NeMo Gym's interpreter, which has no orjson.
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
_NO_STRUCTURE = bytes(byte for byte in range(256) if byte not in b",[{")

MAX_VALUES = 2 << 20
"""Values in one body from outside: one of two bytes takes up to a hundred in memory, and so many half a second."""
MAX_SLOW_VALUES = 1 << 19
"""Values in one body from outside that the standard library reads, which takes ten times as long as orjson."""


def _digits_marked(others: bytes) -> bytes:
    """A table for `bytes.translate` that makes every digit a zero, keeps `others`, and makes everything else a space."""
    return bytes(0x30 if byte in b"0123456789" else byte if byte in others else 0x20 for byte in range(256))


_DIGITS, _DIGITS_AND_POINTS = _digits_marked(b""), _digits_marked(b".")


Verbatim = orjson.Fragment
"""JSON text inside of a value, which `dumps` writes as it is."""


class TooLargeError(ValueError):
    """A body of too many values."""


def loads(data: bytes) -> Any:
    """Parse a JSON document.

    Lone surrogates become U+FFFD, so that the value can be encoded; NaN and Infinity stay floats. Raises `ValueError` for
    anything that is not JSON and for values nested more than `MAX_DEPTH` levels.
    """
    return parse(data)[0]


def loads_own(data: bytes, *, only_fast: bool = False) -> Any:
    """Parse what `dumps` wrote around values that `loads` accepted, or text inside of one: strict JSON, nested as it is."""
    holds_long = _may_hold_long_integer(data)
    if holds_long and only_fast:
        raise _too_slow()
    value = orjson.loads(data)
    if not holds_long and not isinstance(value, float):
        return value
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _may_hold_long_integer(data: bytes) -> bool:
    """Whether 19 digits follow each other, as in every integer beyond 64 bits, and no point stands before them.

    Logprobs close to 0 have as many digits after their point, and the standard library must not read those. The first look
    takes no account of points, so that the search can skip whatever is no digit: four times as fast.
    """
    return b"0" * 19 in data.translate(_DIGITS) and b" " + b"0" * 19 in data.translate(_DIGITS_AND_POINTS)


def loads_object(line: bytes) -> dict[str, Any]:
    """Parse a line that must hold an object. Raises `ValueError` with the reason on one line."""
    try:
        value = loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object, not {type(value).__name__}")
    return value


def parse_bounded(data: bytes, *, values_before: int = 0, times: int = 1) -> tuple[Any, bytes]:
    """As `parse`; raises `TooLargeError` for more than `MAX_VALUES` values, before it parses them.

    A body that orjson does not read as it is may hold `MAX_SLOW_VALUES`. `values_before` are counted too. `times` as many
    may be in a body that repeats others.
    """
    values = values_before + count_values(data)
    if values > times * MAX_VALUES:
        raise TooLargeError(f"has more than {times * MAX_VALUES} values")
    return parse(data, only_fast=values > times * MAX_SLOW_VALUES)


def count_values(data: bytes) -> int:
    """Return at least how many values a document has: every comma and opening bracket, those in texts too."""
    return len(data.translate(None, _NO_STRUCTURE))


def parse(data: bytes, *, only_fast: bool = False) -> tuple[Any, bytes]:
    """As `loads`, with the bytes of exactly this value: `data`, or a new document where something was replaced.

    `only_fast`: not by the standard library.
    """
    try:
        value, lenient = loads_own(data, only_fast=only_fast), False
    except orjson.JSONDecodeError:
        if only_fast:
            raise _too_slow() from None
        value, lenient = _loads_leniently(data), True
    # Values nested so deep have as many brackets, and few bodies do.
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(f"nested more than {MAX_DEPTH} levels")
    return value, dumps(value) if lenient else data


def dumps(value: Any, *, sort_keys: bool = False, indent: bool = False) -> bytes:
    """Write JSON, compact or indented. Lone surrogates become U+FFFD, NaN and infinity null, keys that are numbers text.

    Raises `ValueError` for a value that JSON cannot hold.
    """
    options = _OPTIONS | (orjson.OPT_SORT_KEYS if sort_keys else 0) | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        return orjson.dumps(value, option=options)
    except TypeError:
        pass
    try:
        return json.dumps(
            _cleaned(value),
            indent=2 if indent else None,
            separators=(",", ": ") if indent else (",", ":"),
            sort_keys=sort_keys,
            ensure_ascii=False,
            allow_nan=False,
        ).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except TypeError as error:
        raise ValueError(str(error)) from error


def dumps_to_keep(value: Any) -> bytes:
    """As `dumps`, in no more memory than the text takes: what orjson returns holds up to twelve times as much."""
    return bytes(memoryview(dumps(value)))


def holds_long_integer(value: Any) -> bool:
    """Whether an integer beyond 64 bits is in a value that `loads` returned: most other programs cannot write it."""
    try:
        orjson.dumps(value, option=_OPTIONS)
    except TypeError as error:
        return "64-bit" in str(error)
    return False


def clean_text(text: str) -> str:
    """The text with lone surrogates replaced by U+FFFD, so that it can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        # A pair of surrogates, one escape each, is a character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _too_slow() -> TooLargeError:
    return TooLargeError(
        f"has more than {MAX_SLOW_VALUES} values and needs the slow parser (NaN, integers beyond 64 bits)"
    )


def _loads_leniently(data: bytes) -> Any:
    try:
        return _cleaned(json.loads(data), finite=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _cleaned(value: Any, *, finite: bool = True) -> Any:
    """A copy that JSON can hold, as far as that is possible; `finite`: NaN and infinity become `None`."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Verbatim):
        return json.loads(orjson.dumps(value))
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


def _is_deep(value: Any) -> bool:
    """Whether orjson could not write the value inside a record. Writing it is faster than walking through it."""
    inner = value
    for _ in range(_LEVELS_LEFT):
        inner = (inner,)
    try:
        orjson.dumps(inner)
    except TypeError as error:  # an integer beyond 64 bits ends the writing before the depth is known
        return "ecursion" in str(error) or _levels(value) > MAX_DEPTH
    return False


def _levels(value: Any) -> int:
    level, count = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
        count += 1
    return count
