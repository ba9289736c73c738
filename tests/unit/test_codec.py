"""JSON at the edges: what comes in can always be written again, and what cannot is a `ValueError`."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gymgate.core import codec

TEXT = st.text(st.characters(), max_size=20)
"""Any code points, halves of surrogate pairs included."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(TEXT | st.integers() | st.booleans() | st.none() | st.floats(), inner, max_size=4)
    ),
    max_leaves=20,
)


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@example({math.inf: math.nan})
@given(VALUES)
def test_every_value_can_be_written_and_read_back(value: Any) -> None:
    written = codec.dumps(value)
    read, again = codec.parse(written)
    assert orjson.loads(codec.dumps(read)) == orjson.loads(again)
    written.decode()


@given(VALUES)
def test_every_document_of_another_writer_is_read(value: Any) -> None:
    """The standard library writes surrogates and NaN; what is passed on afterwards is JSON for every reader."""
    document = json.dumps(value).encode()
    read, passed_on = codec.parse(document)
    orjson.loads(passed_on)
    codec.dumps(read).decode()


@given(st.binary(max_size=200))
def test_bytes_that_are_no_json_are_a_value_error(data: bytes) -> None:
    try:
        codec.loads(data)
    except ValueError:
        return


def test_half_a_character_becomes_the_replacement_character() -> None:
    assert codec.parse(b'{"a":"x\\ud83d","b":"\\ud83d\\ude00"}') == (
        {"a": "x\ufffd", "b": "\U0001f600"},
        '{"a":"x\ufffd","b":"\U0001f600"}'.encode(),
    )
    assert codec.dumps({"\ud83d": "\udc00"}) == '{"\ufffd":"\ufffd"}'.encode()
    assert codec.clean_text("a\ud83d\ude00\ud83d") == "a\U0001f600\ufffd"


def test_numbers_that_orjson_refuses() -> None:
    assert codec.loads(b'{"logprob":-Infinity,"n":1180591620717411303424}') == {
        "logprob": -math.inf,
        "n": 2**70,
    }
    assert codec.dumps({1: 2**70, "nan": math.nan}) == b'{"1":1180591620717411303424,"nan":NaN}'.replace(
        b"NaN", b"null"
    )


@pytest.mark.parametrize("number", [2**63, 2**64 + 1, -(2**63) - 1, -(2**64) - 1, 10**400])
def test_an_integer_beyond_64_bits_stays_an_integer(number: int) -> None:
    document = b'{"id":%d,"logprob":-0.00012345678901234567}' % number
    assert codec.parse(document) == ({"id": number, "logprob": -0.00012345678901234567}, document)
    for indent in (False, True):
        assert codec.loads(codec.dumps({"id": number}, indent=indent)) == {"id": number}
    indented = b'{\n  "id": 1,\n  "n": [\n    %d\n  ]\n}' % number
    assert codec.dumps({"id": 1, "n": [number]}, indent=True) == indented


def test_long_integers_do_not_lift_the_bound_on_nesting() -> None:
    def around(levels: int) -> bytes:
        return b"[" * levels + b"%d" % 2**70 + b"]" * levels

    codec.loads(around(codec.MAX_DEPTH))
    with pytest.raises(ValueError, match="nested"):
        codec.loads(around(codec.MAX_DEPTH + 1).ljust(1000))
    with pytest.raises(ValueError, match="nested"):
        codec.loads(b"[%d,%b]" % (2**70, nested(codec.MAX_DEPTH)))
    for levels in range(
        codec.MAX_DEPTH + 1, 1_024
    ):  # the standard library recurses, from whatever depth it is called
        with pytest.raises(ValueError, match="nested"):
            codec.loads(around(levels))


def test_a_document_that_is_a_number() -> None:
    assert [codec.loads(b"%d" % number) for number in (7, 2**70 + 1, -(2**70) - 1)] == [
        7,
        2**70 + 1,
        -(2**70) - 1,
    ]
    assert codec.loads(b"0.5") == 0.5


@pytest.mark.parametrize("document", [b"[" + b"1," * 2000 + number + b"]" for number in (b"1" * 30, b"NaN")])
def test_what_only_the_standard_library_reads_has_a_lower_bound(
    document: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MAX_SLOW_VALUES", len(codec.loads(document)))
    codec.parse_bounded(document)
    monkeypatch.setattr(codec, "MAX_SLOW_VALUES", 1000)
    with pytest.raises(codec.TooLargeError, match="1000"):
        codec.parse_bounded(document)
    codec.parse_bounded(b"[" + b"1," * 2000 + b"1]")
    codec.parse_bounded(b"[" + b"-0.00012345678901234567," * 2000 + b"1]")


@pytest.mark.parametrize("value", [b"1", b"[]", b"{}"])
def test_lists_and_objects_are_values(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    document = b"[" + b",".join([value] * 60) + b"]"
    monkeypatch.setattr(codec, "MAX_VALUES", 100)
    if value == b"1":
        codec.parse_bounded(document)
        return
    with pytest.raises(codec.TooLargeError, match="100"):
        codec.parse_bounded(document)


def test_what_orjson_cannot_write_is_written_alike() -> None:
    """Keys in order, so that equal rows have one key, and text that is JSON already."""
    value = {"b": 2**70, "a": codec.Verbatim(b'{"y":[1]}')}
    assert codec.dumps(value, sort_keys=True) == b'{"a":{"y":[1]},"b":%d}' % 2**70


@pytest.mark.parametrize("document", [b"", b"{", b"\xff", b"[" * 100_000, nested(100_000)])
def test_malformed_documents(document: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        codec.loads(document)


def test_nesting_is_bounded() -> None:
    """By levels, not by brackets: a long flat list has many of those, as have strings."""
    codec.loads(nested(codec.MAX_DEPTH))
    codec.loads(b"[" + b",".join([b"[]"] * 10_000) + b"]")
    codec.loads(b'["' + b"[" * 10_000 + b'"]')
    for levels in (codec.MAX_DEPTH + 1, 300, 1_000, 1_100):
        with pytest.raises(ValueError, match="nested"):
            codec.loads(nested(levels))


def test_values_that_json_cannot_hold() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(5_000):
        deep = [deep]
    for value in ({1, 2}, {"a": object()}, {(1, 2): 3}, endless, deep, b"bytes"):
        with pytest.raises(ValueError, match=r"."):
            codec.dumps(value)
