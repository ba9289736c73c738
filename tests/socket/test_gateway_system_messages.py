"""System messages that newest agents put where chat templates refuse them: as sent, or joined into the first."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from aiohttp import web
from pydantic import ValidationError

from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import PolicyError
from gymgate.gateway.server import Gateway
from gymgate.stack.description import endpoint_settings
from support.upstream import Seen, chat_answer, upstream

USER = {"role": "user", "content": "hi"}
REQUESTS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "Codex 0.171": (
        "responses",
        {
            "input": [
                {"role": "developer", "content": "rules"},
                {"role": "developer", "content": "skills"},
                USER,
            ]
        },
        ["system", "system", "user"],
    ),
    "Claude Code 2.1.197": (
        "messages",
        {"system": "rules", "messages": [USER, {"role": "system", "content": "skills"}], "max_tokens": 9},
        ["system", "user", "system"],
    ),
    "a chat request": (
        "chat/completions",
        {
            "messages": [
                {"role": "developer", "content": "rules"},
                USER,
                {"role": "system", "content": "skills"},
            ]
        },
        ["developer", "user", "system"],
    ),
}
REFUSAL = "System message must be at the beginning."


async def template(seen: Seen) -> web.Response:
    """A server whose chat template is Qwen3.5's in this respect."""
    roles = [message["role"] for message in seen.body["messages"]]
    if {"system", "developer"} & {*roles[1:]}:
        return web.json_response({"error": {"message": REFUSAL, "code": 400}}, status=400)
    return web.json_response(chat_answer())


@pytest.mark.parametrize("name", REQUESTS)
async def test_they_are_joined_if_the_endpoint_asks_for_it(name: str) -> None:
    path, body, roles = REQUESTS[name]
    async with upstream(template) as api, Gateway() as gateway, httpx.AsyncClient(timeout=30) as client:
        kept, joined = gateway.open(api.endpoint()), gateway.open(api.endpoint(system_messages="join"))
        refused = await client.post(f"{kept.base_url}/{path}", json={"model": "m", **body})
        answered = await client.post(f"{joined.base_url}/{path}", json={"model": "m", **body})
    assert (refused.status_code, answered.status_code) == (400, 200)
    assert [message["role"] for message in api.seen[0].body["messages"]] == roles
    first, *rest = api.seen[1].body["messages"]
    assert (first["role"], first["content"]) == (roles[0], "rules\n\nskills")
    assert rest == [USER]
    assert isinstance(kept.failure, PolicyError)
    assert REFUSAL in kept.failure.message
    assert "--system-messages join" in kept.failure.message


async def test_who_joins_them_already_is_not_told_to() -> None:
    async def refuse(seen: Seen) -> web.Response:
        return web.json_response({"error": {"message": REFUSAL, "code": 400}}, status=400)

    async with upstream(refuse) as api, Gateway() as gateway, httpx.AsyncClient(timeout=30) as client:
        route = gateway.open(api.endpoint(system_messages="join"))
        await client.post(f"{route.base_url}/chat/completions", json={"messages": [USER]})
    assert isinstance(route.failure, PolicyError)
    assert "--system-messages" not in route.failure.message


async def test_parts_stay_parts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "system", "content": "rules"}, USER, {"role": "system", "content": [image]}]
    async with upstream(template) as api, Gateway() as gateway, httpx.AsyncClient(timeout=30) as client:
        route = gateway.open(api.endpoint(system_messages="join"))
        await client.post(f"{route.base_url}/chat/completions", json={"messages": messages})
        await client.post(f"{route.base_url}/chat/completions", json={"messages": messages[:2]})
        await client.post(f"{route.base_url}/chat/completions", json={"messages": messages[1::-1]})
    assert api.seen[0].body["messages"][0]["content"] == [{"type": "text", "text": "rules"}, image]
    assert [seen.body["messages"] for seen in api.seen[1:]] == [messages[:2]] * 2


def test_it_is_a_setting_of_chat_endpoints_and_of_a_run() -> None:
    with pytest.raises(ValidationError, match="dialect"):
        HTTPEndpoint(base_url="http://a/v1", dialect="responses", system_messages="join")
    settings = endpoint_settings(HTTPEndpoint(base_url="http://a/v1", system_messages="join"))
    assert settings["system_messages"] == "join"
