"""vLLM's answers through the gateway, plain and streamed: the same words and the same tool call on every way."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from benchmarks.engine.server import MODEL

from gymgate.core.config import HTTPEndpoint
from gymgate.gateway.server import Gateway

pytestmark = pytest.mark.timeout(500)  # the first test waits for the server

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION = "What is the weather like in Paris?"
Dialect = Literal["chat", "responses"]


async def by_chat(client: openai.AsyncOpenAI, stream: bool, tool: bool) -> tuple[str, Any]:
    """Text, or the call's arguments; and why the answer ended."""
    function = {"name": "get_weather", "description": "The weather of a city.", "parameters": CITY}
    more: Any = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    request: Any = {
        "model": "policy",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 128 if tool else 16,
        **(more if tool else {}),
    }
    if not stream:
        (choice,) = (await client.chat.completions.create(**request)).choices
        said = choice.message.tool_calls[0].function.arguments if tool else choice.message.content
        return said, choice.finish_reason
    text, reason = "", None
    async for event in await client.chat.completions.create(**request, stream=True):
        for part in event.choices:
            calls = part.delta.tool_calls or []
            text += calls[0].function.arguments or "" if tool and calls else part.delta.content or ""
            reason = part.finish_reason or reason
    return text, reason


async def by_responses(client: openai.AsyncOpenAI, stream: bool, tool: bool) -> tuple[str, Any]:
    """Text, or the call's arguments; and the answer's status."""
    function = {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": CITY,
    }
    request: Any = {
        "model": "policy",
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": 128 if tool else 16,
        **({"tools": [function], "tool_choice": "required"} if tool else {}),
    }
    if stream:
        events = [event async for event in await client.responses.create(**request, stream=True)]
        answer = events[-1].response
        deltas = [event.delta for event in events if event.type.endswith(".delta")]
    else:
        answer, deltas = await client.responses.create(**request), []
    said = (
        next(item.arguments for item in answer.output if item.type == "function_call")
        if tool
        else answer.output_text
    )
    assert "".join(deltas) in ("", said)
    return said, answer.status


ASK = {"chat": by_chat, "responses": by_responses}


@pytest.mark.parametrize(
    "tool", [pytest.param(False, id="text"), pytest.param(True, id="tool", marks=pytest.mark.heavy)]
)
async def test_every_way_gives_the_same_answer(tool: bool, vllm_url: str) -> None:
    """The agent's API, the endpoint's API, plain or streamed: eight ways. vLLM forces a call, but not its arguments' schema."""
    found = {}
    async with Gateway() as gateway:
        for endpoint in ("chat", "responses"):
            target = HTTPEndpoint(base_url=f"{vllm_url}/v1", dialect=endpoint, model=MODEL)
            route = gateway.open(target)
            async with openai.AsyncOpenAI(base_url=route.base_url, api_key="any", max_retries=0) as client:
                for api, ask in ASK.items():
                    for stream in (False, True):
                        found[endpoint, api, stream] = await ask(client, stream, tool)
            assert [call.status_code for call in route.calls] == [200] * 4
    texts = {text for text, _ in found.values()}
    assert len(texts) == 1, found
    for api in ASK:
        assert len({why for (_, asked, _), (_, why) in found.items() if asked == api}) == 1, found
    if tool:
        assert isinstance(json.loads(texts.pop()), dict)
