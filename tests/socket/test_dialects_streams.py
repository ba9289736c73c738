"""The official clients put our event streams together again, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, LengthFinishReasonError

from gymgate.core.config import Dialect
from gymgate.gateway.dialects import encode_stream, translate_answer
from gymgate.gateway.dialects.reading import without_none
from support.upstream import Seen, upstream

Json = dict[str, Any]

LOGPROB: Json = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
    {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]
MESSAGES: dict[str, tuple[Json, str]] = {
    "all": ({"content": "x", "reasoning_content": "why", "tool_calls": CALLS}, "tool_calls"),
    "calls": ({"content": None, "tool_calls": CALLS}, "tool_calls"),
    "text": ({"content": "x"}, "stop"),
    "cut": ({"content": "x"}, "length"),
    "refusal": ({"content": None, "refusal": "no"}, "stop"),
    "empty": ({"content": ""}, "stop"),
    "thoughts": ({"content": None, "reasoning": "why"}, "stop"),
}
REQUEST: Json = {"model": "m", "stream": True, "include": ["message.output_text.logprobs"]}


def completion(case: str) -> Json:
    message, finish = MESSAGES[case]
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 17,
        "model": "m",
        "choices": [{**choice, "logprobs": {"content": [LOGPROB]} if case == "text" else None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def answer_in(dialect: Dialect, case: str) -> Json:
    return translate_answer(completion(case), REQUEST, "chat", dialect)


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    """A server that streams the case that the request names as its model."""

    async def handle(seen: Seen) -> web.Response:
        dialect: Dialect = {"completions": "chat", "responses": "responses", "messages": "messages"}[
            seen.path.rsplit("/", 1)[1]
        ]
        stream = b"".join(encode_stream(answers[dialect], dialect, seen.body))
        return web.Response(body=stream, headers={"Content-Type": "text/event-stream"})

    async with upstream(handle) as serving:
        yield serving.url.removesuffix("/v1")


answers: dict[Dialect, Json] = {}


@pytest.mark.parametrize("case", MESSAGES)
async def test_responses(base_url: str, case: str) -> None:
    answers["responses"] = answer = answer_in("responses", case)
    async with (
        AsyncOpenAI(base_url=f"{base_url}/v1", api_key="k", max_retries=0) as client,
        client.responses.stream(model="m", input="hi") as stream,
    ):
        events = [event async for event in stream]
        # The helper's own final response waits for `response.completed`, which OpenAI does not send here either.
        final = events[-1].response if case == "cut" else await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    end = "response.incomplete" if case == "cut" else "response.completed"
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created",
        "response.in_progress",
        end,
    ]
    written = final.model_dump(mode="json", exclude_unset=True)
    for item, expected in zip(written["output"], answer["output"], strict=True):
        item.pop("parsed_arguments", None)
        for part in item.get("content") or []:
            part.pop("parsed", None)
        assert item == expected
    assert (written["status"], written["usage"]) == (answer["status"], answer["usage"])
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == final.output_text == (MESSAGES[case][0].get("content") or "")


@pytest.mark.parametrize("case", MESSAGES)
async def test_chat(base_url: str, case: str) -> None:
    answers["chat"] = answer = answer_in("chat", case)
    async with (
        AsyncOpenAI(base_url=f"{base_url}/v1", api_key="k", max_retries=0) as client,
        client.chat.completions.stream(
            model="m", messages=[{"role": "user", "content": "hi"}], stream_options={"include_usage": True}
        ) as stream,
    ):
        async for _ in stream:
            pass
        try:
            completed: Any = await stream.get_final_completion()
        except LengthFinishReasonError as error:
            completed = error.completion
        final = completed.model_dump(mode="json")
    choice, expected = final["choices"][0], answer["choices"][0]
    message = {name: value for name, value in choice["message"].items() if value is not None}
    message.pop("parsed", None)
    for call in message.get("tool_calls", []):
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    assert message == {name: value for name, value in expected["message"].items() if value is not None}
    assert choice["finish_reason"] == expected["finish_reason"]
    assert ((choice["logprobs"] or {}).get("content") or []) == ([LOGPROB] if case == "text" else [])
    assert {name: final["usage"][name] for name in answer["usage"]} == answer["usage"]


@pytest.mark.parametrize("case", MESSAGES)
async def test_messages(base_url: str, case: str) -> None:
    answers["messages"] = answer = answer_in("messages", case)
    async with (
        AsyncAnthropic(base_url=base_url, api_key="k", max_retries=0) as client,
        client.messages.stream(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        ) as stream,
    ):
        final = (await stream.get_final_message()).model_dump(mode="json", exclude_none=True)
    blocks = [{k: v for k, v in block.items() if k != "parsed_output"} for block in final["content"]]
    assert blocks == [without_none(block) for block in answer["content"]]
    assert final["stop_reason"] == answer["stop_reason"]
    counts = without_none(answer["usage"])
    assert {name: final["usage"][name] for name in counts} == counts


async def test_responses_items_of_other_kinds(base_url: str) -> None:
    """Streams of what a Responses endpoint gave: built-in calls, reasoning with its text, custom calls."""
    output: list[Json] = [
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "long"}],
            "encrypted_content": "opaque",
        },
        {
            "type": "web_search_call",
            "id": "ws",
            "status": "completed",
            "action": {"type": "search", "query": "q"},
        },
        {"type": "custom_tool_call", "id": "ct", "call_id": "a", "name": "sh", "input": "ls"},
    ]
    answers["responses"] = {**answer_in("responses", "text"), "output": output}
    async with (
        AsyncOpenAI(base_url=f"{base_url}/v1", api_key="k", max_retries=0) as client,
        client.responses.stream(model="m", input="hi") as stream,
    ):
        final = (await stream.get_final_response()).model_dump(mode="json", exclude_unset=True)
    assert final["output"] == output
