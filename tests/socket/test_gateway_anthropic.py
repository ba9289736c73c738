"""The official Anthropic client through the gateway, as Claude Code uses it: tools over two turns, plain and streamed."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from aiohttp import web

from gymgate.gateway.server import Gateway
from support.upstream import Seen, chat_answer, responses_answer, upstream

TOOL: Any = {
    "name": "Bash",
    "description": "run",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
COMMANDS = ("ls", "pwd")


def call_id(number: int) -> str:
    return f"call-{number}"


async def policy(seen: Seen) -> web.Response:
    """Calls the tool twice in one turn, then says what came of it; over either API."""
    body = seen.body
    arguments = [json.dumps({"command": command}) for command in COMMANDS]
    if seen.path.endswith("completions"):
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if results:
            return web.json_response(chat_answer(f"saw {results}"))
        calls = [
            {"id": call_id(n), "type": "function", "function": {"name": "Bash", "arguments": text}}
            for n, text in enumerate(arguments)
        ]
        message = {"role": "assistant", "content": "let me look", "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        return web.json_response(chat_answer(choices=[choice]))
    results = [item["output"] for item in body["input"] if item.get("type") == "function_call_output"]
    answer = responses_answer(f"saw {results}" if results else "let me look")
    if not results:
        answer["output"] += [
            {
                "type": "function_call",
                "id": f"fc-{n}",
                "call_id": call_id(n),
                "name": "Bash",
                "arguments": text,
            }
            for n, text in enumerate(arguments)
        ]
    return web.json_response(answer)


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("endpoint", ["chat", "responses"])
async def test_tools_over_two_turns(endpoint: Any, streamed: bool) -> None:
    async with upstream(policy) as served, Gateway() as gateway:
        route = gateway.open(served.endpoint(dialect=endpoint))
        base_url = route.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key="any", max_retries=0) as client:

            async def ask(messages: list[Any]) -> anthropic.types.Message:
                request: Any = {"model": "m", "max_tokens": 99, "tools": [TOOL], "messages": messages}
                if not streamed:
                    return await client.messages.create(**request)
                async with client.messages.stream(**request) as stream:
                    return await stream.get_final_message()

            messages: list[Any] = [{"role": "user", "content": "where am I?"}]
            first = await ask(messages)
            text, *calls = first.content
            assert (text.type, first.stop_reason) == ("text", "tool_use")
            assert [(each.type, each.name, each.input, each.id) for each in calls] == [
                ("tool_use", "Bash", {"command": command}, call_id(n)) for n, command in enumerate(COMMANDS)
            ]
            results = [
                {"type": "tool_result", "tool_use_id": each.id, "content": f"did {each.input['command']}"}
                for each in calls
            ]
            second = await ask(
                [
                    *messages,
                    {"role": "assistant", "content": first.model_dump(exclude_none=True)["content"]},
                    {"role": "user", "content": results},
                ]
            )
        (said,) = second.content
        assert said.type == "text"
        assert (said.text, second.stop_reason) == ("saw ['did ls', 'did pwd']", "end_turn")
        assert (second.usage.input_tokens, second.usage.output_tokens) == (3, 2)
        assert [(call.dialect, call.status_code) for call in route.calls] == [("messages", 200)] * 2


async def test_a_refusal_is_the_clients_own_error() -> None:
    async with upstream() as served, Gateway() as gateway:
        request: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="0" * 32, max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError, match="key"):
                await client.messages.create(**request)
        route = gateway.open(served.endpoint())
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=route.key, max_retries=0) as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.count_tokens(model="m", messages=request["messages"])
        assert served.seen == []
