"""Whatever is sent to the gateway's ports: an answer or a closed connection, soon, and never a 500."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymgate.core.errors import ConfigError, PolicyError
from gymgate.gateway.backends.callable import CallableBackend
from gymgate.gateway.dialects import ConversationMemory, translate_request
from gymgate.gateway.dialects.reading import fault_of
from gymgate.gateway.server import Gateway
from support.translation import checked_translation

ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
}
OPERATIONS = ("responses", "chat/completions", "messages", "models", "tokenize", "", "v1/v1", "%00", "../x")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        *(
            "input",
            "messages",
            "tools",
            "tool_choice",
            "metadata",
            "model",
            "stream",
            "instructions",
            "system",
        ),
        *(
            "max_tokens",
            "temperature",
            "text",
            "response_format",
            "reasoning",
            "previous_response_id",
            "stop",
        ),
    ]
)
PARTS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "reasoning", "text", "tool_use"]
        )
        | JSON,
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]) | JSON,
        "content": JSON | st.lists(JSON, max_size=3),
        "call_id": JSON,
        "tool_call_id": JSON,
        "tool_calls": st.lists(JSON, max_size=2) | JSON,
        "name": JSON,
        "arguments": JSON,
        "output": JSON,
        "summary": JSON,
        "id": JSON,
    },
)
BODIES = st.dictionaries(FIELDS, JSON | st.lists(PARTS, max_size=4) | st.text(max_size=30), max_size=6)
ANSWERS = st.dictionaries(
    st.sampled_from(["choices", "output", "content", "usage", "id", "status", "stop_reason"]),
    JSON | st.lists(PARTS, max_size=3),
)
DIALECTS = st.sampled_from(["responses", "chat", "messages"])


def request(method: str, path: str, body: bytes, headers: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


async def exchange(port: int, data: bytes, *, end: bool = False) -> bytes:
    """What comes back until the connection is closed; `end` says that no more will be sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def status(answer: bytes) -> int | None:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else None


async def send_all(requests: list[bytes], *, end: bool = False) -> list[bytes]:
    """Send each to a fresh gateway; `{key}` in a path stands for a live rollout's key."""
    async with Gateway() as gateway:
        route = gateway.open(CallableBackend(lambda body: ANSWER, "chat", 5))
        answers = [
            await exchange(gateway.port, data.replace(b"{key}", route.key.encode()), end=end)
            for data in requests
        ]
        await route.close()
        assert not gateway.routes
        assert not gateway.in_flight
    return answers


@settings(max_examples=50)
@given(bodies=st.lists(st.tuples(st.sampled_from(OPERATIONS), BODIES | JSON), min_size=1, max_size=30))
def test_any_json_gets_an_answer(bodies: list[tuple[str, Any]]) -> None:
    """A policy that answers nothing but one text stands behind it: every fault is the request's."""
    requests = [
        request("POST", f"/ng-rollout/{{key}}/v1/{operation}", json.dumps(body).encode())
        for operation, body in bodies
    ]
    for answer, sent in zip(asyncio.run(send_all(requests)), requests, strict=True):
        found = status(answer)
        assert found is not None, sent
        assert found < 500, (sent, answer)


@settings(max_examples=50)
@given(
    chunks=st.lists(
        st.binary(max_size=300) | st.sampled_from([b"\r\n", b"POST / HTTP/1.1\r\n", b"\0" * 50]), max_size=12
    )
)
def test_any_bytes_get_an_answer_or_the_door(chunks: list[bytes]) -> None:
    (answer,) = asyncio.run(send_all([b"".join(chunks)], end=True))
    assert status(answer) is None or status(answer) < 500  # type: ignore[operator]


@settings(max_examples=300)
@given(body=BODIES, source=DIALECTS, target=DIALECTS)
def test_requests_translate_or_are_refused(body: dict[str, Any], source: Any, target: Any) -> None:
    """A refusal blames the request. A translation can be sent, holds a conversation, and leaves the request as it was."""
    before = copy.deepcopy(body)
    try:
        translated = translate_request(body, source, target, ConversationMemory())
    except ConfigError:
        return
    finally:
        assert body == before
    json.dumps(translated)
    if source != target:
        said = translated["input" if target == "responses" else "messages"]
        assert isinstance(said, list)
        assert all(isinstance(item, dict) for item in said)


@settings(max_examples=300)
@given(
    answer=ANSWERS,
    source=DIALECTS,
    target=DIALECTS,
)
def test_answers_translate_or_are_refused(answer: dict[str, Any], source: Any, target: Any) -> None:
    """An endpoint's answer is no more to be trusted than a request: one that is taken is an answer in the agent's dialect."""
    before = copy.deepcopy(answer)
    try:
        translated = checked_translation(
            answer, {"messages": [], "input": []}, source, target, ConversationMemory()
        )
    except PolicyError:
        return
    except ConfigError:  # nothing that gymgate asks speaks messages
        assert source == "messages" != target
        return
    finally:
        assert answer == before
    json.dumps(translated)
    if source != target:
        assert fault_of(translated, target) is None


@pytest.mark.parametrize(
    "head",
    [
        "POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n{",
        "POST /v1/responses HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n{",
        "GET /" + "x" * 100_000 + " HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\n" + "X: y\r\n" * 50_000 + "\r\n",
        "POST /v1/responses HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    ],
)
async def test_what_never_ends_holds_no_memory(head: str) -> None:
    """A promised body takes no memory before it comes; heads are bounded."""
    async with Gateway() as gateway:
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(20):
                await exchange(gateway.port, head.encode(), end=True)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 4_000_000
        finally:
            tracemalloc.stop()
