"""What a Python function may return as a policy's answer, and what it is told about the rest."""

from __future__ import annotations

import asyncio
import types
from typing import Any

import aiohttp
import pytest
from anthropic.types import Message
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.responses import Response

from gymgate.core.config import Dialect
from gymgate.core.errors import PolicyError
from gymgate.gateway.backends.callable import CallableBackend
from gymgate.gateway.server import Gateway
from support.upstream import chat_answer

TEXT = "The capital is Paris."
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Paris"}'}}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1.0,
    "model": "m",
    "status": "completed",
    "output": [
        {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "France?"}]},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": TEXT, "annotations": []}],
        },
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
ANSWERS: dict[str, Any] = {
    "a string": TEXT,
    "a message": {"role": "assistant", "content": TEXT},
    "a message without a role": {"content": TEXT},
    "a message of content parts": {"role": "assistant", "content": [{"type": "text", "text": TEXT}]},
    "openai's message": ChatCompletionMessage(role="assistant", content=TEXT),
    "a completion": chat_answer(TEXT),
    "openai's completion": ChatCompletion.model_validate(chat_answer(TEXT)),
    "openai's completion, not validated": ChatCompletion.construct(**chat_answer(TEXT)),
    "a response": RESPONSE,
    "openai's response": Response.model_validate(RESPONSE),
}


async def answered(answer: Any, dialect: Dialect, operation: str) -> dict[str, Any]:
    """What an agent gets that speaks another dialect than the function, or the same."""
    body = {"model": "m", "input": "?"} if operation == "responses" else {"model": "m", "messages": [USER]}
    async with Gateway() as gateway:
        route = gateway.open(CallableBackend(lambda body: answer, dialect))
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{route.base_url}/{operation}", json=body) as response,
        ):
            assert response.status == 200, await response.text()
            got: dict[str, Any] = await response.json()
            return got


USER = {"role": "user", "content": "?"}


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize("name", ANSWERS)
async def test_what_people_return_is_read(name: str, dialect: Dialect) -> None:
    chat = await answered(ANSWERS[name], dialect, "chat/completions")
    said = chat["choices"][0]["message"]["content"]
    assert (said if isinstance(said, str) else said[0]["text"]) == TEXT
    assert chat["choices"][0]["message"]["role"] == "assistant"
    ChatCompletion.model_validate(
        chat | {"choices": [chat["choices"][0] | {"message": {"role": "assistant"}}]}
    )
    got = await answered(ANSWERS[name], dialect, "responses")
    [message] = [item for item in got["output"] if item["type"] == "message"]
    assert [part["text"] for part in message["content"]] == [TEXT]
    assert ("response" in name) == (got["output"][0]["type"] == "reasoning")


@pytest.mark.parametrize(("stop_reason", "status"), [("end_turn", "completed"), ("max_tokens", "incomplete")])
async def test_an_anthropic_message_that_was_cut_is_incomplete(stop_reason: str, status: str) -> None:
    message: dict[str, Any] = {
        **{"id": "m", "type": "message", "role": "assistant", "model": "c", "stop_sequence": None},
        **{"content": [{"type": "text", "text": TEXT}], "usage": {"input_tokens": 1, "output_tokens": 1}},
        "stop_reason": stop_reason,
    }
    for answer in (message, Message.model_validate(message)):
        got = await answered(answer, "responses", "responses")
        assert got["status"] == status
        assert got["output"][0]["content"][0]["text"] == TEXT


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_a_messages_tool_calls_are_kept(dialect: Dialect) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    for answer in (message, ChatCompletionMessage.model_validate(message)):
        chat = await answered(answer, dialect, "chat/completions")
        assert chat["choices"][0]["finish_reason"] == "tool_calls"
        assert chat["choices"][0]["message"]["tool_calls"][0]["function"] == CALL["function"]
        [item] = (await answered(answer, dialect, "responses"))["output"]
        assert (item["name"], item["arguments"]) == ("look_up", CALL["function"]["arguments"])


BAD: dict[str, tuple[Any, str]] = {
    "nothing": (None, "NoneType"),
    "a number": (0.5, "float"),
    "bytes": (b"text", "bytes"),
    "a list": ([TEXT], "list"),
    "some object": (types.SimpleNamespace(content=TEXT), "SimpleNamespace"),
    "another role": ({"role": "user", "content": TEXT}, "'user'"),
    "a block that is no text": (
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {}}]},
        "'tool_use'",
    ),
    "a message's content of another type": ({"role": "assistant", "content": 3}, "int"),
    "something else": ({"text": TEXT}, "text"),
}


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_read_is_named(name: str, dialect: Dialect) -> None:
    answer, word = BAD[name]
    with pytest.raises(PolicyError) as raised:
        await CallableBackend(lambda body: answer, dialect).call({"messages": [USER]})
    assert word in str(raised.value)
    assert raised.value.retryable is False


async def test_an_object_that_cannot_be_dumped_fails_its_call() -> None:
    class Odd:
        def model_dump(self, **options: Any) -> Any:
            raise KeyError("dump")

    with pytest.raises(PolicyError) as raised:
        await CallableBackend(lambda body: Odd()).call({"messages": [USER]})
    assert "Odd" in str(raised.value)


async def test_a_policy_whose_own_task_is_cancelled_fails_its_call() -> None:
    """Nobody cancelled the call, so somebody waits for its answer."""

    async def cancels_itself(body: dict[str, Any]) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return TEXT

    backend = CallableBackend(cancels_itself)
    for _ in range(2):
        with pytest.raises(PolicyError) as raised:
            await asyncio.create_task(backend.call({"messages": [USER]}))
        assert "CancelledError" in str(raised.value)


async def test_a_cancelled_call_cancels_its_policy() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def waits(body: dict[str, Any]) -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return TEXT

    call = asyncio.create_task(CallableBackend(waits).call({"messages": [USER]}))
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ended.is_set()
