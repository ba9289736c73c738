"""The official openai client through the gateway: plain and streaming, sync and async."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from gymgate.gateway.server import Gateway
from support.upstream import upstream

ENDPOINTS = ["chat", "responses"]


def ask_chat(client: Any, stream: bool) -> Any:
    return client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], stream=stream
    )


def ask_responses(client: Any, stream: bool) -> Any:
    return client.responses.create(model="m", input="hi", stream=stream)


ASK = {"chat": ask_chat, "responses": ask_responses}


def text_of(api: str, answer: Any) -> str:
    return str(answer.choices[0].message.content if api == "chat" else answer.output_text)


def text_of_events(api: str, events: list[Any]) -> str:
    if api == "chat":
        return "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    return "".join(event.response.output_text for event in events if event.type == "response.completed")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("api", ASK)
async def test_async_client(api: str, endpoint: Any) -> None:
    async with upstream() as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(dialect=endpoint))
        async with openai.AsyncOpenAI(base_url=route.base_url, api_key="any", max_retries=0) as client:
            assert text_of(api, await ASK[api](client, stream=False)) == "hello"
            events = [event async for event in await ASK[api](client, stream=True)]
        assert text_of_events(api, events) == "hello"
        assert [call.status_code for call in route.calls] == [200, 200]
        assert all(call.usage.input_tokens == 3 and call.usage.output_tokens == 2 for call in route.calls)
        assert "stream" not in policy.seen[1].body


@pytest.mark.parametrize("api", ASK)
async def test_sync_client(api: str) -> None:
    async with upstream() as policy, Gateway() as gateway:
        route = gateway.open(policy.endpoint(dialect=api))

        def ask() -> tuple[str, str]:
            with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=route.key, max_retries=0) as client:
                plain = text_of(api, ASK[api](client, stream=False))
                return plain, text_of_events(api, list(ASK[api](client, stream=True)))

        assert await asyncio.to_thread(ask) == ("hello", "hello")
        assert [call.dialect for call in route.calls] == [api, api]


async def test_a_policys_401_arrives_as_the_clients_own_error_and_is_not_retried() -> None:
    async with upstream() as policy, Gateway() as gateway:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="0" * 32) as client:
            with pytest.raises(openai.AuthenticationError, match="key"):
                await ask_chat(client, stream=False)
            models = openai.AsyncOpenAI(
                base_url=gateway.open(policy.endpoint(model="m")).base_url, api_key="x"
            )
            assert [model.id async for model in models.models.list()] == ["m"]
            await models.close()
        assert policy.seen == []
