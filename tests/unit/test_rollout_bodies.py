"""Bodies of model calls are kept once, and come back as they were."""

from __future__ import annotations

import pickle
import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymgate.rollout import ModelCall, Rollout
from gymgate.rollout.bodies import BodyLog, BodyReader, RecordedBodies


def conversation(turns: int, field: str = "input", start: str = "hi") -> list[bytes]:
    """Requests of one conversation, each with all items before it and fields after them."""
    items: list[dict[str, Any]] = [{"role": "user", "content": start}]
    bodies = []
    for turn in range(turns):
        bodies.append(orjson.dumps({"model": "m", field: items, "tools": [{"name": "t" * 500}]}))
        items = [*items, {"role": "assistant", "content": f"{start} {turn} {'x' * 200}"}]
    return bodies


def logged(bodies: list[bytes]) -> BodyLog:
    log = BodyLog()
    assert [log.add(body) for body in bodies] == list(range(len(bodies)))
    return log


@given(st.lists(st.binary(max_size=30), max_size=30))
def test_every_body_comes_back(bodies: list[bytes]) -> None:
    deltas = logged(bodies).deltas
    for order in (range(len(bodies)), random.Random(0).sample(range(len(bodies)), len(bodies))):
        reader = BodyReader(deltas)
        assert {number: reader.body(number) for number in order} == dict(enumerate(bodies))


def test_a_log_grows_with_the_conversation_and_not_with_its_square() -> None:
    bodies = conversation(400)
    kept = sum(len(delta.middle) for delta in logged(bodies).deltas)
    assert kept < 1.5 * len(bodies[-1])
    assert sum(map(len, bodies)) > 100 * kept


def test_conversations_that_take_turns_find_their_own() -> None:
    one, other = conversation(100), conversation(100, "messages", "somebody else")
    mixed = [body for pair in zip(one, other, strict=True) for body in pair]
    log = logged(mixed)
    assert sum(len(delta.middle) for delta in log.deltas) < 1.5 * (len(one[-1]) + len(other[-1]))
    reader = BodyReader(log.deltas)
    assert [reader.body(number) for number in range(len(mixed))] == mixed


def test_parsed_conversations_share_their_items() -> None:
    reader = BodyReader(logged(conversation(3)).deltas)
    first, last = reader.parsed(1), reader.parsed(2)
    assert last["input"][0] is first["input"][0]
    assert len(first["input"]) == 2
    assert reader.parsed(2) is last


class Source:
    """Counts what is read."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def read(self, name: str) -> dict[str, Any] | None:
        self.names.append(name)
        return {"name": name} if name != "upstream_request" else None


def test_a_call_reads_a_body_when_it_is_asked_for_and_once() -> None:
    source = Source()
    call = ModelCall.reading_from(source, index=0, dialect="chat", status_code=200)
    assert (call.status_code, source.names) == (200, [])
    assert call.request is call.request == {"name": "request"}
    assert source.names == ["request"]
    dumped = Rollout.model_construct(
        id="r", environment="e", agent="a", status="completed", calls=[call]
    ).model_dump()
    assert dumped["calls"][0]["upstream_response"] == {"name": "upstream_response"}
    assert dumped["calls"][0]["upstream_request"] is None
    assert ModelCall.model_validate(dumped["calls"][0]) == call
    assert len(source.names) == 4
    with pytest.raises(AttributeError, match="nothing"):
        _ = call.nothing


def test_a_call_that_was_not_read_can_be_pickled() -> None:
    bodies = RecordedBodies(
        BodyReader(logged(conversation(2)).deltas),
        {"request": 1, "upstream_request": None},
        {"response": b'{"a":1}'},
    )
    call = pickle.loads(pickle.dumps(ModelCall.reading_from(bodies, index=0, dialect="responses")))
    assert len(call.request["input"]) == 2
    assert (call.response, call.upstream_request, call.upstream_response) == ({"a": 1}, None, None)
