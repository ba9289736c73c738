"""A request that extends an earlier one is parsed as far as it is new, and reads as if it had been parsed whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gymgate.core import codec
from gymgate.core.config import Dialect
from gymgate.gateway import conversations
from gymgate.gateway.conversations import Conversations, session_id
from gymgate.rollouts.history import History

HEAD = {"model": "m", "temperature": 1.0}
WRITERS: dict[str, dict[str, Any]] = {
    "compact": {"separators": (",", ":"), "ensure_ascii": False},
    "aiohttp": {},
    "indented": {"indent": 2},
}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(st.sampled_from('ab"\\]},:[{\x00é'), max_size=8)
    | st.sampled_from(["messages", '"messages":[', "input", '],"input":[1]', "tools"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "input", "tools", '],"', "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.sampled_from(["model", "input", "tools", '],"', "z"]), VALUES, max_size=3)


def turns(count: int, size: int = 200) -> list[list[dict[str, Any]]]:
    """The histories of one conversation, turn by turn."""
    items = [{"role": "user", "content": f"{n} " + "x" * size} for n in range(2 * count)]
    return [items[: 2 * n + 1] for n in range(count)]


def same(reader: Conversations, raw: bytes, dialect: Dialect = "chat") -> Any:
    """The value of a request, after it was compared with what a parser without memory reads."""
    try:
        expected = codec.parse_bounded(raw)
    except ValueError as error:
        with pytest.raises(type(error)):
            reader.parse(raw, dialect)
        return None
    value, passed_on = reader.parse(raw, dialect)
    assert (codec.dumps(value), passed_on) == (codec.dumps(expected[0]), expected[1])
    return value


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("dialect", "field"), [("chat", "messages"), ("responses", "input")])
def test_what_was_sent_before_is_not_parsed_again(
    dialect: Dialect, field: str, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fields before and after the conversation, one of which changes from call to call."""
    reader, parsed = Conversations(), []
    parse = codec.parse_bounded
    monkeypatch.setattr(
        conversations.codec,
        "parse_bounded",
        lambda data, **settings: parsed.append(len(data)) or parse(data, **settings),
    )
    for number, history in enumerate(turns(30, size=2000)):
        body = {**HEAD, field: history, "tools": [[], {"tools": [], field: [1]}], "max_tokens": 100 - number}
        raw = json.dumps(body, **WRITERS[writer]).encode()
        parsed.clear()
        value, passed_on = reader.parse(raw, dialect)
        assert (list(value), value, passed_on) == (list(body), body, raw)
        assert isinstance(value[field], History)
        assert sum(parsed) < 12_000 or number < 2
    assert len(raw) > 100_000


def marked(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An Anthropic history as Claude Code sends it: its last two messages of the user have marks for the cache."""
    users = [at for at, message in enumerate(history) if message["role"] == "user"][-2:]
    return [
        {
            **message,
            "content": [
                {
                    "type": "text",
                    "text": message["content"],
                    **({"cache_control": {"type": "ephemeral"}} if at in users else {}),
                }
            ],
        }
        for at, message in enumerate(history)
    ]


def test_marks_that_move_cost_the_last_messages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, parsed = Conversations(), []
    parse = codec.parse_bounded
    monkeypatch.setattr(
        conversations.codec,
        "parse_bounded",
        lambda data, **settings: parsed.append(len(data)) or parse(data, **settings),
    )
    history, shared, earlier = [], [], None
    for number in range(30):
        history.append({"role": "user", "content": f"{number} " + "x" * 2000})
        raw = codec.dumps({"model": "m", "messages": marked(history), "max_tokens": 9})
        parsed.clear()
        value = reader.parse(raw, "messages")[0]
        assert codec.dumps(value) == raw
        assert sum(parsed) < 25_000 or number < 3
        assert number < 3 or value["messages"].extends(earlier)
        earlier = value["messages"]
        shared.append(earlier.shared)
        history.append({"role": "assistant", "content": f"answer {number} " + "y" * 2000})
    assert shared[3:] == [2 * n - 4 for n in range(3, 30)]


def test_items_of_an_earlier_request_are_the_same_objects() -> None:
    reader = Conversations()
    first, second, third = (
        reader.parse(codec.dumps({**HEAD, "messages": history}), "chat")[0]["messages"]
        for history in turns(3)
    )
    assert second[0] is first[0]
    assert second.shared == len(first)
    assert third[2] is second[2]
    assert second.extends(first)
    assert third.extends(second)
    assert not third.extends(first)


def test_conversations_that_take_turns_are_told_apart() -> None:
    reader = Conversations()
    for history in turns(5):
        for name in "abc":
            body = {"messages": [{"role": "system", "content": name}, *history]}
            value = same(reader, codec.dumps(body))
            assert value["messages"].shared == max(0, len(history) - 1)


def shared(reader: Conversations, messages: list[dict[str, Any]], dialect: Dialect = "chat") -> int:
    """How many of a request's items are known from an earlier one."""
    value = reader.parse(codec.dumps({"messages": messages}), dialect)[0]
    return int(value["messages"].shared)


def test_of_the_requests_that_it_begins_with_the_longest_is_extended() -> None:
    """An agent that tried its first request again, and then went on from its second one."""
    reader, (first, second, third) = Conversations(), turns(3)
    for messages in (first, second):
        shared(reader, messages)
    assert shared(reader, first) == 0
    assert shared(reader, third) == len(second)


def test_a_long_conversation_does_not_push_the_others_out() -> None:
    reader = Conversations()
    other, more = ([{"role": "system", "content": "b"}, *history] for history in turns(2))
    shared(reader, other)
    for history in turns(2 * conversations.RECENT):
        shared(reader, history)
    assert shared(reader, more) == len(other)


def test_of_many_bytes_the_oldest_requests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "KEPT_BYTES", 3000)
    reader = Conversations()
    one, other = ([{"role": "system", "content": name * 2000}] for name in "ab")
    for messages in (one, other):
        assert shared(reader, messages) == 0
    assert shared(reader, [*other, {"role": "user", "content": "hi"}]) == 1
    assert shared(reader, [*one, {"role": "user", "content": "hi"}]) == 0


def test_the_beginning_of_a_conversation_is_read_once() -> None:
    reader, starts = Conversations(), []
    for history in turns(3):
        body = reader.parse(
            codec.dumps({"messages": [{"role": "system", "content": "s"}, *history]}), "chat"
        )[0]
        assert body["messages"].start is (starts[-1] if starts else None)
        session_id(body, "chat", "policy_model", "secret")
        starts.append(body["messages"].start)
    assert starts[0] is not None


def test_a_request_with_another_beginning_is_another_session() -> None:
    """Also where its first message is that of an earlier request, and the user's is another."""
    reader, ids = Conversations(), []
    for text in ("one", "other"):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
        body = reader.parse(codec.dumps({"messages": messages}), "messages")[0]
        ids.append(session_id(body, "messages", "policy_model", "secret"))
        assert body["messages"].shared == (text == "other")
    assert len({*ids}) == 2


@pytest.mark.parametrize(
    "later",
    [
        b'{"messages":[{"a":1},{"b":2}],"messages":[{"c":3}]}',
        b'{"messages":[{"a":1},{"b":2}],"mess\\u0061ges":[{"c":3}]}',
        b'{"messages":[{"a":1}],"x":[{"b":2}]}',
        b'{"messages":[{"a":1}]}',
        b'{"messages":[{"a":1},{"b":2}',
        b'{"messages":[{"a":1},]}',
        b'{"messages":[{"a":1}{"b":2}]}',
        b'{"messages":[{"a":1},{"b":"\\ud83d"}]}',
        b'{"messages":[{"a":1},{"b":NaN}]}',
        b'{"messages":[{"a":1},{"b":18446744073709551617}]}',
        b'{"messages":[{"a":1},' + b"[" * 201 + b"]" * 201 + b"]}",
    ],
)
def test_what_follows_is_read_as_it_is_written(later: bytes) -> None:
    start, more = b'{"messages":[{"a":1}]}', b'{"messages":[{"a":1},{"z":0}]}'
    for earlier in ([start], [start, more], [start, start]):
        reader = Conversations()
        for raw in (*earlier, later, b'{"messages":[{"a":1},{"b":2},{"d":4}]}', later):
            same(reader, raw)


@pytest.mark.parametrize(
    "first",
    [
        b'{"messages":[1,2],"k":1,"messages":[3,4]}',
        b'{"metadata":{"messages":[1,2]},"messages":[3,4]}',
        b'{"messages":[1,2],"other":[3,4]}',
        b'{"messages":[1,12]}',
        b'{"messages":[1],"t":1,"x":[2],"t":5}',
        b'{"messages":[[1,2],{"x":[3]}],"],\\"x":["],\\"x"]}',
        b'{"messages":[1],"z":2,"messages":[8]}',
    ],
)
@pytest.mark.parametrize(
    "changed",
    [
        (b'1],"z":2,"messages":[8]', b'1,5],"z":2'),
        (b"2]", b"2,5]"),
        (b"4]", b"4,5]"),
        (b"]}", b",5]}"),
        (b"12", b"123"),
    ],
)
def test_where_the_conversation_ends_is_never_guessed_wrong(
    first: bytes, changed: tuple[bytes, bytes]
) -> None:
    reader = Conversations()
    for raw in (first, first.replace(*changed), first.replace(*changed).replace(*changed), first):
        same(reader, raw)


@example([1], [True], {}, {})
@example([{"messages": [1]}], [1.0], {'],"': 1}, {"tools": ["]"]})
@given(st.lists(VALUES, min_size=1, max_size=3), st.lists(VALUES, max_size=3), FIELDS, FIELDS)
def test_any_requests_read_as_if_parsed_whole(
    start: list[Any], more: list[Any], before: dict[str, Any], after: dict[str, Any]
) -> None:
    for settings in WRITERS.values():
        reader = Conversations()
        for items in (start, [*start, *more], [*start, *more, *more], start, [*start, 1], [*more, *start]):
            same(reader, json.dumps({**before, "messages": items, **after}, **settings).encode())


def test_the_bound_on_values_holds_for_all_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_VALUES", 1000)
    reader, items = Conversations(), [1] * 300
    for _ in range(3):
        assert same(reader, codec.dumps({"messages": items})) is not None
        items = items + [1] * 300
    with pytest.raises(codec.TooLargeError, match="1000"):
        reader.parse(codec.dumps({"messages": items}), "chat")


@pytest.mark.parametrize("limit", ["KEPT_BYTES", "KEPT_VALUES"])
def test_large_requests_are_not_kept(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, limit, 100)
    reader = Conversations()
    for history in turns(2, size=10) + turns(30, size=10)[-1:]:
        value = same(reader, codec.dumps({"messages": history}))
    assert not isinstance(value["messages"], History)


def test_a_null_is_no_nan_of_an_earlier_request() -> None:
    """NaN is written as null, with which the agent's own next request may begin."""
    reader = Conversations()
    value, _ = reader.parse(b'{"messages":[NaN,1]}', "chat")
    assert str(value["messages"][0]) == "nan"
    value, _ = reader.parse(b'{"messages":[null,1,2]}', "chat")
    assert value["messages"] == [None, 1, 2]


def test_an_empty_conversation_is_none_that_was_sent_twice() -> None:
    """Of two fields of one name the last counts, and the first was empty."""
    reader = Conversations()
    same(reader, b'{"messages":[],"stream":false,"messages":[{"role":"user","content":"old"}]}')
    assert same(reader, b'{"messages":[]}') == {"messages": []}
    assert same(reader, b'{"messages":[{"a":1}]}') == {"messages": [{"a": 1}]}
