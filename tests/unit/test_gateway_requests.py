"""Paths and keys taken apart, without a socket."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.json_server import error_text, shortened
from gymgate.gateway import repeats
from gymgate.gateway.call import Call
from gymgate.gateway.dialects.reading import fault_of
from gymgate.gateway.repeats import HASHED, RequestKey, RetryDeduplicator
from gymgate.gateway.requests import (
    METADATA_KEY,
    key_of_headers,
    parse_path,
    take_routing_entry,
)
from gymgate.rollouts.record import ModelCall

KEY = "0123456789abcdef" * 2

PATHS = {
    "/": (None, ""),
    "/v1/responses": (None, "responses"),
    "/responses/": (None, "responses"),
    "/v1/v1/messages?beta=true": (None, "messages"),
    f"/ng-rollout/{KEY}/v1/chat/completions": (KEY, "chat/completions"),
    f"/ng-rollout/{KEY}/training-token-capture/v1/responses": (KEY, "responses"),
    f"/ng-rollout/{KEY}": (KEY, ""),
    "/ng-rollout/": ("", ""),
    "/v1/models/m/x": (None, "models/m/x"),
}


@pytest.mark.parametrize("path", PATHS)
def test_paths(path: str) -> None:
    assert tuple(parse_path(path)) == PATHS[path]


def test_keys() -> None:
    assert key_of_headers({"Authorization": f"Bearer {KEY}"}) == KEY
    assert key_of_headers({"Authorization": "Bearer sk-x", "x-api-key": KEY}) == KEY
    assert key_of_headers({"Authorization": f"Basic {KEY}"}) is None
    for placeholder in ("dummy", "deadbeef" * 2, KEY + "0"):
        assert key_of_headers({"Authorization": f"Bearer {placeholder}"}) is None


def test_the_routing_entry_leaves_no_trace() -> None:
    body = {"a": 1, "metadata": {"b": "2", METADATA_KEY: KEY}, "c": 3}
    assert take_routing_entry(body) == ({"a": 1, "metadata": {"b": "2"}, "c": 3}, KEY)
    assert list(take_routing_entry(body)[0]) == ["a", "metadata", "c"]
    assert take_routing_entry({"a": 1, "metadata": {METADATA_KEY: KEY}}) == ({"a": 1}, KEY)
    entry = {
        METADATA_KEY: f"http://127.0.0.1:1/ng-rollout/{KEY}/v1"
    }  # of a service that is told its policy's base URL
    assert take_routing_entry({"a": 1, "metadata": entry}) == ({"a": 1}, KEY)
    for untouched in ({"metadata": {}}, {"metadata": None, "input": METADATA_KEY}, {"input": "x"}):
        assert take_routing_entry(untouched)[0] is untouched


def gone(*, closing: bool = False) -> Call:
    """A call whose connection is lost, or is being closed."""
    transport = SimpleNamespace(is_closing=lambda: True) if closing else None
    connection: Any = SimpleNamespace(transport=transport)
    return Call(ModelCall(index=0, dialect="chat"), payload=b"answer", connection=connection)


def test_a_connection_that_is_being_closed_is_lost() -> None:
    assert gone().connection_lost
    assert gone(closing=True).connection_lost


def test_an_answer_that_is_written_leaves_its_siblings() -> None:
    key, first, second = RequestKey("m", "chat", b"{}", None), gone(), gone()
    repeated = RetryDeduplicator()
    repeated.add(key, first)
    repeated.add(key, second)
    repeated.note_delivery(key, first)
    assert repeated.find(key, retry=False) is second


def test_a_call_under_way_keeps_its_answer_however_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MARKED_ANSWERS", 1)
    repeated, calls = RetryDeduplicator(), [gone() for _ in range(3)]
    keys = [RequestKey("m", "chat", b"{}", f"key {number}") for number in range(3)]
    for key, call in zip(keys, calls, strict=True):
        repeated.add(key, call)
    repeated.note_delivery(keys[1], calls[1])
    assert [call.payload for call in calls] == [b"answer", b"", b"answer"]


@pytest.mark.parametrize("name", ["key", None])
def test_an_answer_takes_no_look_at_the_others(name: str | None) -> None:
    """The bodies of all of them were measured for every call, with an idempotency key or without."""

    class Body(bytes):
        def __len__(self) -> int:
            measured.append(self)
            return super().__len__()

    repeated, measured = RetryDeduplicator(), []
    for number in range(repeats.MARKED_ANSWERS + 5):
        key, call = RequestKey("m", "chat", Body(b"%d" % number), name and f"{name} {number}"), gone()
        measured.clear()
        repeated.add(key, call)
        repeated.note_delivery(key, call)
    assert len(measured) < 12


def test_a_call_made_anew_for_its_key_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "KEPT_BYTES", 20)
    repeated, key, other = (
        RetryDeduplicator(),
        *(RequestKey("m", "chat", b"{}", name) for name in ("key", "other")),
    )
    for again in range(3):
        call = gone()
        repeated.add(key, call)
        for _ in range(again + 1):  # also if its answer is written several times
            repeated.note_delivery(key, call)
    repeated.add(other, second := gone())
    repeated.note_delivery(other, second)
    assert (repeated.find(key, retry=True), repeated.find(other, retry=True)) == (call, second)


def test_long_bodies_that_differ_in_the_middle_alone_are_different_calls() -> None:
    """The hash leaves the middle out, equality does not."""
    sent, other = (
        RequestKey("policy_model", "chat", b"a" * HASHED + middle + b"z" * HASHED, None)
        for middle in (b"1", b"2")
    )
    assert hash(sent) == hash(other)
    resends, call = RetryDeduplicator(), Call(ModelCall(index=0, dialect="chat"))
    resends.add(sent, call)
    assert resends.find(RequestKey(*sent), retry=False) is call
    assert resends.find(other, retry=False) is None


def test_what_is_an_answer() -> None:
    message = {"role": "assistant", "content": None}
    assert fault_of({"choices": [{"message": message}]}, "chat") is None
    assert fault_of({"choices": [OrderedDict(message=OrderedDict(message))]}, "chat") is None
    assert "choices" in str(fault_of({"choices": ["x"]}, "chat"))
    assert fault_of({"output": []}, "responses") is None
    assert fault_of({"output": [], "error": None, "status": "incomplete"}, "responses") is None
    failed = {"output": [], "status": "failed", "error": {"message": "out of memory"}}
    assert "out of memory" in str(fault_of(failed, "responses"))
    assert fault_of({"status": "failed"}, "responses") is not None
    assert "nothing" in str(fault_of({}, "chat"))


def test_error_texts() -> None:
    assert error_text({"error": {"message": "a\n b", "code": 1}}) == "a b"
    assert error_text({"detail": [1, 2]}) == '{"detail":[1,2]}'
    assert shortened("a\n  b", 300) == "a b"
    assert shortened("abcdefgh", 6) == "abc..."


MESSAGE = {
    "type": "message",
    "id": "m",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "x"}],
}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}]}


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({**MESSAGE, "id": None}, "output.1.id"),
        ({**MESSAGE, "role": "user"}, "output.1.role"),
        ({**MESSAGE, "content": None}, "output.1.content"),
        ({**MESSAGE, "content": [{"type": "output_text", "text": 1}]}, "output.1.content"),
        ({**CALL, "arguments": {}}, "output.1.arguments"),
        ({**CALL, "name": None}, "output.1.name"),
        ({**CALL, "call_id": []}, "output.1.call_id"),
        ({**THOUGHT, "summary": "x"}, "output.1.summary"),
        ({"content": "x"}, "output.1.type"),
        ({"type": 1}, "output.1.type"),
    ],
)
def test_an_answer_that_breaks_the_schema_is_the_endpoints_fault(item: dict[str, Any], place: str) -> None:
    """NeMo Gym's agent would answer it with HTTP 500, as if the environment were broken."""
    assert place in str(fault_of({"output": [MESSAGE, item]}, "responses"))


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"usage": {"input_tokens": "many"}}, "usage.input_tokens"),
        ({"object": "list"}, "object"),
        ({"created_at": "x"}, "created_at"),
        ({"tools": {}}, "tools"),
        ({"x": [{"y": 2**70}]}, "64 bits"),
    ],
)
def test_a_response_that_breaks_the_schema_is_the_endpoints_fault(fields: dict[str, Any], place: str) -> None:
    assert place in str(fault_of({"output": [MESSAGE], **fields}, "responses"))


def test_what_servers_leave_out_or_add_is_no_fault() -> None:
    more = [
        {"type": "web_search_call", "id": None},
        {**CALL, "id": None, "status": None},
        {**THOUGHT, "content": None},
    ]
    assert (
        fault_of({"id": 1, "output": [MESSAGE, CALL, *more], "usage": {"cost": 1}, "x": 1}, "responses")
        is None
    )


def test_a_tool_call_whose_id_is_no_text_is_the_endpoints_fault() -> None:
    calls = [{"id": {}, "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert "id" in str(fault_of({"choices": [{"message": {"tool_calls": calls}}]}, "chat"))
