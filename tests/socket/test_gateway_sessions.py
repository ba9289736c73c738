"""Each conversation of a rollout has a session, which the routers in front of its endpoints are told of, and of its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from aiohttp import web

from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import ConfigError, PolicyError
from gymgate.gateway.backends import http
from gymgate.gateway.server import Gateway
from gymgate.tokens.engines.http import VLLMGenerateEngine
from support.upstream import Seen, Upstream, chat_answer, drop, upstream

Json = dict[str, Any]
HEADER = "X-Session-ID"
USER = {"role": "user", "content": "hi"}
DONE = {"role": "assistant", "content": "hello"}


def system(text: str) -> Json:
    return {"role": "system", "content": text}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


async def ask(client: httpx.AsyncClient, url: str, *messages: Json, **fields: Any) -> int:
    body = {"model": "m", "messages": list(messages), **fields}
    return (await client.post(f"{url}/chat/completions", json=body)).status_code


def sessions(api: Upstream, header: str = HEADER) -> list[str | None]:
    return [seen.headers.get(header) for seen in api.seen if not seen.path.endswith("session")]


async def test_the_calls_of_a_conversation_share_a_session(client: httpx.AsyncClient) -> None:
    """Whether it goes on, was edited, or is asked with other settings. Another agent's, and another rollout's, are others."""
    async with upstream() as api, Gateway() as gateway:
        for _ in range(2):
            route = gateway.open(api.endpoint())
            history = [system("plan"), USER]
            await ask(client, route.base_url, *history)
            await ask(client, route.base_url, *history, DONE, USER)
            await ask(client, route.base_url, *history, {**DONE, "content": "edited"}, USER, temperature=1)
            await ask(client, route.base_url, system("write"), USER)
            await ask(client, route.base_url, system("write"), USER, DONE, USER)
            await route.close()
    one, *others = (sessions(api)[:5], sessions(api)[5:])
    for ids in (one, *others):
        assert ids[0] == ids[1] == ids[2] != ids[3] == ids[4]
        assert None not in ids
    assert not set(one) & set(others[0])
    assert all(route_key not in str(sessions(api)) for route_key in (route.key, route.rollout_id))


@pytest.mark.parametrize(
    ("operation", "bodies"),
    [
        ("responses", [{"input": "hi"}, {"input": "hi", "instructions": "write"}]),
        ("responses", [{"input": "hi"}, {"input": "write"}]),
        (
            "messages",
            [
                {"messages": [USER], "max_tokens": 9, "system": text}
                for text in ("plan", [{"type": "text", "text": "write"}])
            ],
        ),
    ],
)
async def test_conversations_are_told_apart_in_every_dialect(
    operation: str, bodies: list[Json], client: httpx.AsyncClient
) -> None:
    async with upstream() as api, Gateway() as gateway:
        route = gateway.open(api.endpoint())
        for body in (*bodies, *bodies):
            answer = await client.post(f"{route.base_url}/{operation}", json={"model": "m", **body})
            assert answer.status_code == 200, answer.text
    ids = sessions(api)
    assert ids[:2] == ids[2:]
    assert len(set(ids)) == 2


async def test_marks_for_the_cache_are_no_other_conversation(client: httpx.AsyncClient) -> None:
    """Claude Code marks its last messages, in each call others."""
    marked = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    first = [{"role": "user", "content": marked}]
    async with upstream() as api, Gateway() as gateway:
        route = gateway.open(api.endpoint())
        for messages in (first, [USER, DONE, *first], [USER, DONE, USER, DONE, *first]):
            body = {"model": "m", "max_tokens": 9, "messages": messages}
            assert (await client.post(f"{route.base_url}/messages", json=body)).status_code == 200
    assert len(set(sessions(api))) == 1


@pytest.mark.parametrize("judge", ["own", "policy"])
async def test_a_judge_has_a_session_of_its_own(judge: str, client: httpx.AsyncClient) -> None:
    """Also where it is asked with the policy's own history, at the policy's endpoint."""
    async with upstream() as api, Gateway() as gateway:
        port = await gateway.port_for("judge")
        route = gateway.open(api.endpoint(), judges={"judge": api.endpoint() if judge == "own" else "policy"})
        await ask(client, route.base_url, USER)
        await ask(client, route.base_url.replace(str(gateway.port), str(port)), USER, DONE, USER)
        await ask(client, route.base_url, USER, DONE, USER)
        assert {call.model_server for call in route.calls} == {"policy_model", "judge"}
    policy, judges, again = sessions(api)
    assert policy == again
    assert judges not in (policy, None)


async def test_a_call_without_a_rollouts_key_has_no_session(client: httpx.AsyncClient) -> None:
    async with upstream() as api, Gateway(judges={"judge": api.endpoint()}) as gateway:
        port = await gateway.port_for("judge")
        assert await ask(client, f"http://127.0.0.1:{port}/v1", USER) == 200
    assert sessions(api) == [None]


@pytest.mark.parametrize(
    ("settings", "header", "is_sent"),
    [
        ({"session_header": "X-SMG-Routing-Key"}, "X-SMG-Routing-Key", True),
        ({"session_header": None}, HEADER, False),
    ],
)
async def test_the_header_is_a_setting(
    settings: Json, header: str, is_sent: bool, client: httpx.AsyncClient
) -> None:
    async with upstream() as api, Gateway() as gateway:
        await ask(client, gateway.open(api.endpoint(**settings)).base_url, USER)
    assert (sessions(api, header)[0] is not None) == is_sent
    assert is_sent or settings["session_header"] is None
    assert header == HEADER or sessions(api) == [None]


async def test_a_header_of_the_users_own_goes_before(client: httpx.AsyncClient) -> None:
    async with upstream() as api, Gateway() as gateway:
        await ask(client, gateway.open(api.endpoint(headers={"x-session-id": "mine"})).base_url, USER)
    assert [value for name, value in api.seen[0].headers.items() if name.lower() == "x-session-id"] == [
        "mine"
    ]


@pytest.mark.parametrize("header", ["Content-Length", "a b", "x\r\ny", "Host", "via", "Accept"])
async def test_a_header_that_cannot_be_sent_is_refused(header: str) -> None:
    """Or that would be sent twice."""
    async with Gateway() as gateway:
        with pytest.raises(ConfigError, match="header"):
            gateway.open(HTTPEndpoint(base_url="http://127.0.0.1:1/v1", session_header=header))
    with pytest.raises(PolicyError, match="header"):
        VLLMGenerateEngine("http://127.0.0.1:1", session_header=header.replace("via", "host"))


async def finishing(seen: Seen) -> web.StreamResponse:
    """A router that knows /finish_session, in front of an endpoint that fails where it is told to."""
    if seen.path.endswith("/finish_session"):
        return web.json_response({})
    return await drop(seen) if "fail" in seen.raw.decode() else web.json_response(chat_answer())


@pytest.mark.parametrize("outcome", ["completed", "failed", "cancelled", "unused"])
async def test_the_end_of_each_session_is_told_whatever_the_outcome(
    outcome: str, client: httpx.AsyncClient
) -> None:
    never = asyncio.Event()

    async def script(seen: Seen) -> web.StreamResponse:
        if outcome == "cancelled" and not seen.path.endswith("/finish_session"):
            await never.wait()
        return await finishing(seen)

    async with upstream(script) as api, Gateway() as gateway:
        route = gateway.open(api.endpoint(finish_sessions=True, api_key="secret-key"))
        if outcome == "cancelled":
            calls = [asyncio.create_task(ask(client, route.base_url, system(text), USER)) for text in "ab"]
            await api.arrivals(2)
            await route.close()
            await asyncio.gather(*calls)
        elif outcome != "unused":
            text = {"role": "user", "content": "fail" if outcome == "failed" else "hi"}
            for name in ("a", "b", "a"):
                await ask(client, route.base_url, system(name), text)
            if outcome == "completed":
                await route.close()
                await route.close()
            # The gateway's own end closes the routes that are left, and waits until the ends are told.
    ends = [seen for seen in api.seen if seen.path.endswith("/finish_session")]
    assert {seen.path for seen in ends} <= {"/finish_session"}
    told = [seen.request.query["session_id"] for seen in ends]
    assert sorted(told) == sorted({*sessions(api)})
    assert len(told) == (0 if outcome == "unused" else 2)
    assert {seen.headers["Authorization"] for seen in ends} <= {"Bearer secret-key"}
    assert {seen.request.method for seen in ends} <= {"POST"}


async def test_nobody_is_told_who_did_not_ask(client: httpx.AsyncClient) -> None:
    async with upstream() as api, Gateway() as gateway:
        route = gateway.open(api.endpoint())
        await ask(client, route.base_url, USER)
        await route.close()
    assert [seen.path for seen in api.seen] == ["/v1/chat/completions"]


async def test_a_router_without_it_fails_no_rollout(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(seen: Seen) -> web.StreamResponse:
        if seen.path.endswith("/finish_session"):
            return web.json_response({}, status=404)
        return web.json_response(chat_answer())

    with caplog.at_level(logging.WARNING):
        async with upstream(script) as api, Gateway() as gateway:
            route = gateway.open(api.endpoint(finish_sessions=True))
            assert await ask(client, route.base_url, USER) == 200
            await route.close()
            assert route.failure is None
    assert "404" in caplog.text


async def test_a_router_that_does_not_answer_holds_nothing_up(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "FINISH_TIMEOUT_S", 0.5)

    async def script(seen: Seen) -> web.StreamResponse:
        if seen.path.endswith("/finish_session"):
            await asyncio.Event().wait()
        return web.json_response(chat_answer())

    with caplog.at_level(logging.WARNING):
        async with upstream(script) as api, Gateway() as gateway, asyncio.timeout(20):
            route = gateway.open(api.endpoint(finish_sessions=True))
            for name in "ab":
                await ask(client, route.base_url, system(name), USER)
            await route.close()
    assert caplog.text.count("no answer") == 2


async def test_each_replica_that_a_rollout_had_is_told(client: httpx.AsyncClient) -> None:
    """It moves to another one when its own fails."""
    async with upstream(finishing) as one, upstream(finishing) as other, Gateway() as gateway:
        route = gateway.open(one.endpoint(replicas=(other.url,), finish_sessions=True))
        await ask(client, route.base_url, USER)
        first = one if one.seen else other
        first.script = drop
        await ask(client, route.base_url, USER, DONE, USER)
        first.script = finishing
        await route.close()
    for api in (one, other):
        assert [seen.path for seen in api.seen][-1] == "/finish_session"


async def test_each_replica_is_told_of_the_sessions_that_it_had(client: httpx.AsyncClient) -> None:
    async with upstream(finishing) as one, upstream(finishing) as other, Gateway() as gateway:
        endpoint = one.endpoint(replicas=(other.url,), finish_sessions=True)
        for text in "ab":
            await ask(client, gateway.open(endpoint).base_url, {"role": "user", "content": text})
        for route in list(gateway.routes.values()):
            await route.close()
    for api in (one, other):
        assert [seen.request.query["session_id"] for seen in api.seen[1:]] == sessions(api)
        assert len(api.seen) == 2
