"""`strict` of a tool reaches a chat endpoint only if its settings say so, as with NeMo Gym's server for vLLM."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gymgate.gateway.server import Gateway
from support.upstream import upstream

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "custom": {"name": "c"}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "responses": (
        "responses",
        {
            "input": "hi",
            "tools": [{"type": "function", **FUNCTION, "strict": True}, {"type": "custom", "name": "c"}],
        },
    ),
    "chat": (
        "chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}, CUSTOM],
        },
    ),
}


@pytest.mark.parametrize("strict_tools", [False, True])
@pytest.mark.parametrize("source", REQUESTS)
async def test_strict_reaches_a_chat_endpoint_if_it_should(source: str, strict_tools: bool) -> None:
    path, body = REQUESTS[source]
    async with upstream() as api, Gateway() as gateway, httpx.AsyncClient(timeout=30) as client:
        route = gateway.open(api.endpoint(strict_tools=strict_tools))
        answer = await client.post(f"{route.base_url}/{path}", json={"model": "m", **body})
        assert answer.status_code == 200, answer.text
    function = {**FUNCTION, "strict": True} if strict_tools else FUNCTION
    assert api.seen[0].body["tools"] == [{"type": "function", "function": function}, CUSTOM]


async def test_a_responses_endpoint_gets_it() -> None:
    path, body = REQUESTS["responses"]
    async with upstream() as api, Gateway() as gateway, httpx.AsyncClient(timeout=30) as client:
        route = gateway.open(api.endpoint(dialect="responses"))
        await client.post(f"{route.base_url}/{path}", json={"model": "m", **body})
    assert api.seen[0].body["tools"] == body["tools"]
