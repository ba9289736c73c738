"""Requests of model calls are kept once, and come back as they were."""

from __future__ import annotations

import tracemalloc
from typing import Any

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from gymgate.core import codec
from gymgate.rollouts import history
from gymgate.rollouts.history import History, RequestLog, read_requests

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.0, 1.0, "a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=6,
)
BODIES = st.dictionaries(st.sampled_from(["model", "input", "messages", "tools"]), VALUES, max_size=3)


def conversation(turns: int, field: str = "input", start: str = "hi") -> list[dict[str, Any]]:
    """Requests of one conversation, each with all items before it and fields after them."""
    items: list[dict[str, Any]] = [{"role": "user", "content": start}]
    bodies = []
    for turn in range(turns):
        bodies.append({"model": "m", field: items, "tools": [{"name": "t" * 500}]})
        items = [*items, {"role": "assistant", "content": f"{start} {turn} {'x' * 200}"}]
    return bodies


def logged(bodies: list[dict[str, Any]]) -> RequestLog:
    log = RequestLog()
    assert [log.add(body) for body in bodies] == list(range(len(bodies)))
    return log


def read_back(log: RequestLog) -> list[dict[str, Any]]:
    return read_requests([codec.loads(entry) for entry in log.entries])


def size(bodies: list[dict[str, Any]]) -> int:
    return sum(len(codec.dumps(body)) for body in bodies)


@example([{"input": [1]}, {"input": [True]}, {"input": [1.0, 2]}, {"input": {"1": 1}}])
@given(st.lists(BODIES, max_size=12))
def test_every_request_comes_back_with_its_fields_in_order(bodies: list[dict[str, Any]]) -> None:
    assert [codec.dumps(body) for body in read_back(logged(bodies))] == [codec.dumps(body) for body in bodies]


def test_a_log_grows_with_the_conversation_and_not_with_its_square() -> None:
    bodies = conversation(400)
    kept = sum(map(len, logged(bodies).entries))
    assert kept < 1.5 * size(bodies[-1:])
    assert size(bodies) > 100 * kept


def test_conversations_that_take_turns_find_their_own() -> None:
    one, other = conversation(100), conversation(100, "messages", "somebody else")
    mixed = [body for pair in zip(one, other, strict=True) for body in pair]
    log = logged(mixed)
    assert sum(map(len, log.entries)) < 1.5 * size([one[-1], other[-1]])
    assert read_back(log) == mixed


def test_a_conversation_that_was_compacted_starts_anew() -> None:
    bodies = [*conversation(3), *conversation(2, start="a summary")]
    assert read_back(logged(bodies)) == bodies


def test_requests_of_a_conversation_share_their_items() -> None:
    first, last = read_back(logged(conversation(3)))[1:]
    assert last["input"][0] is first["input"][0]
    assert len(first["input"]) == 2


def test_entries_are_plain_json() -> None:
    entries = [orjson.loads(entry) for entry in logged(conversation(2)).entries]
    assert entries[1] == {
        "extends": 0,
        "fields": {
            "model": {},
            "input": {"items": 1, "value": [{"role": "assistant", "content": f"hi 0 {'x' * 200}"}]},
            "tools": {},
        },
    }


def test_a_history_that_goes_on_is_logged_without_a_look_at_what_it_had(monkeypatch: Any) -> None:
    """Requests by their lineage alone; and beside requests without one, as any others."""
    histories = [History([{"n": 0}])]
    for number in range(1, 4):
        histories.append(History([*histories[-1], {"n": number}], histories[-1]))
    histories.append(History(histories[-1], histories[-1]))
    digested: list[Any] = []
    digest = history._digest
    monkeypatch.setattr(history, "_digest", lambda value: digested.append(value) or digest(value))
    log = RequestLog()
    for known in histories:
        log.add({"model": "m", "input": known})
    assert [value for value in digested if value != "m"] == []
    log.add({"model": "m", "input": [*histories[1], {"n": "other"}]})
    log.add({"model": "m", "input": History([{"n": 7}])})
    assert read_back(log) == [
        *({"model": "m", "input": list(history)} for history in histories),
        {"model": "m", "input": [{"n": 0}, {"n": 1}, {"n": "other"}]},
        {"model": "m", "input": [{"n": 7}]},
    ]
    assert [orjson.loads(entry)["fields"]["input"].get("items") for entry in log.entries[:6]] == [
        None,
        1,
        2,
        3,
        None,
        2,
    ]


def test_a_log_takes_no_more_memory_than_its_text() -> None:
    """What orjson returns holds several times its length."""
    log = RequestLog()
    tracemalloc.start()
    log.add({"input": "x" * 1_000_000})
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_500_000


def test_a_request_is_recorded_as_the_end_of_its_own_conversation() -> None:
    log, base = RequestLog(), History([{"a": 1}, {"b": 2}])
    for items in (base, History([{"c": 3}]), History([{"a": 1}, {"b": 2}, {"d": 4}], base)):
        log.add({"input": items})
    assert codec.loads_object(log.entries[2])["extends"] == 0
