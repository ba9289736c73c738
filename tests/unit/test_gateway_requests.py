"""Paths and keys taken apart, without a socket."""

from __future__ import annotations

import json

import pytest

from gymgate.gateway.backends.answers import error_text, fault_of, shortened
from gymgate.gateway.requests import (
    METADATA_KEY,
    key_of_headers,
    parse_path,
    take_routing_entry,
    without_attempt,
)

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
    assert without_attempt(f"{KEY}-a3") == KEY
    assert without_attempt(f"{KEY}-b") == f"{KEY}-b"
    assert key_of_headers({"Authorization": f"Bearer {KEY}"}) == KEY
    assert key_of_headers({"Authorization": "Bearer sk-x", "x-api-key": KEY}) == KEY
    assert key_of_headers({"Authorization": f"Basic {KEY}"}) is None
    assert key_of_headers({"Authorization": "Bearer dummy"}) is None


def test_the_routing_entry_leaves_no_trace() -> None:
    def take(body: dict[str, object]) -> tuple[dict[str, object], str | None]:
        return take_routing_entry(body, json.dumps(body).encode())

    body = {"a": 1, "metadata": {"b": "2", METADATA_KEY: KEY}, "c": 3}
    assert take(body) == ({"a": 1, "metadata": {"b": "2"}, "c": 3}, KEY)
    assert list(take(body)[0]) == ["a", "metadata", "c"]
    assert take({"a": 1, "metadata": {METADATA_KEY: KEY}}) == ({"a": 1}, KEY)
    for untouched in ({"metadata": {}}, {"metadata": None, "input": METADATA_KEY}, {"input": "x"}):
        assert take(untouched)[0] is untouched


def test_what_is_an_answer() -> None:
    message = {"role": "assistant", "content": None}
    assert fault_of({"choices": [{"message": message}]}, "chat") is None
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
