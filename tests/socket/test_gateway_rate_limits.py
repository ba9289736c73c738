"""A rate limit is waited out until the rollout's deadline; a used-up quota is not."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from pydantic import SecretStr

from gymgate.core import retrying
from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import PolicyError
from gymgate.core.http_client import HTTPClient
from gymgate.core.retrying import Retryable, is_quota_used_up, is_retried, retry_after_s
from gymgate.gateway.backends.http import HTTPBackend
from gymgate.gateway.route import Route
from gymgate.gateway.server import Gateway
from gymgate.stack.daemon.rollout import RolloutRun, new_client
from support.hosted_api import KEY, HostedAPI
from support.upstream import Seen, Upstream, chat_answer, upstream

CONCURRENT = 64
CALLS = 4
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def no_long_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "LONGEST_BACKOFF_S", 0.01)


def endpoint(api: Upstream, **fields: Any) -> HTTPEndpoint:
    return HTTPEndpoint(base_url=api.url, model="gpt-hosted", api_key=SecretStr(KEY), **fields)


async def ask(http: aiohttp.ClientSession, route: Route) -> tuple[int, str]:
    async with http.post(f"{route.base_url}/chat/completions", json=BODY) as response:
        answer = await response.json()
        return response.status, (answer.get("error") or {}).get("message", "")


@pytest.mark.parametrize("replicas", [False, True])
async def test_with_a_third_of_the_calls_refused_none_is_lost(replicas: bool) -> None:
    script = HostedAPI(refused=0.3, **{"retry-after-ms": "5"})

    async def rollout(gateway: Gateway, http: aiohttp.ClientSession) -> list[int]:
        route = gateway.open(endpoint(api, replicas=(second.url,) if replicas else ()))
        statuses = [(await ask(http, route))[0] for _ in range(CALLS)]
        assert route.failure is None
        await route.close()
        return statuses

    async with (
        upstream(script) as api,
        upstream(script) as second,
        Gateway() as gateway,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        rollouts = await asyncio.gather(*(rollout(gateway, http) for _ in range(CONCURRENT)))
    assert rollouts == [[200] * CALLS] * CONCURRENT
    assert script.answers.count(429) > 50


async def test_a_rate_limit_that_has_passed_is_over_and_each_call_has_a_key_of_its_own() -> None:
    """An endpoint that keeps its answers by that key takes a retry for the same call, and no other one."""

    async def busy_once(seen: Seen) -> web.StreamResponse:
        if len(api.seen) == 1:
            return web.json_response({}, status=429, headers={"Retry-After": "0"})
        return web.json_response(chat_answer())

    async with upstream(busy_once) as api, HTTPClient() as client:
        backend = HTTPBackend(endpoint(api), client)
        noted: list[int] = []
        await backend.call(BODY, note=noted.append)
        assert noted == [0, 1]
        assert backend.rate_limit is None
        await backend.call(BODY)
    keys = [seen.headers["Idempotency-Key"] for seen in api.seen]
    assert keys[0] == keys[1] != keys[2]


async def test_a_used_up_quota_is_not_asked_again() -> None:
    script = HostedAPI(left=1)
    async with upstream(script) as api, Gateway() as gateway, aiohttp.ClientSession() as http:
        route = gateway.open(endpoint(api))
        assert (await ask(http, route))[0] == 200
        status, message = await ask(http, route)
        assert status >= 400
        assert "quota" in message
        assert script.answers == [200, 429]
        assert route.failure is not None
        assert (route.failure.status_code, route.failure.retryable) == (429, False)


async def test_without_retries_a_rate_limit_fails() -> None:
    script = HostedAPI(refused=1.0)
    async with upstream(script) as api, Gateway() as gateway, aiohttp.ClientSession() as http:
        route = gateway.open(endpoint(api, max_retries=0))
        assert (await ask(http, route))[0] == 502
        assert script.answers == [429]


async def test_the_end_of_a_rollout_ends_the_wait() -> None:
    async with upstream(HostedAPI(refused=1.0)) as api, Gateway() as gateway, aiohttp.ClientSession() as http:
        prepared = gateway.prepare(endpoint(api))
        route = gateway.open(prepared)
        asking = asyncio.create_task(ask(http, route))
        async with asyncio.timeout(20):
            await api.arrivals(5)
            assert isinstance(route.rate_limit, PolicyError)
            assert "Rate limit reached" in route.rate_limit.message
            other: Any = prepared.backend()
            assert other.rate_limit is None, "another rollout has not met it"
            await route.close()
            assert (await asking)[0] == 404
        before = len(api.seen)
        assert (await ask(http, gateway.open(endpoint(api, max_retries=0))))[0] == 502
        assert len(api.seen) == before + 1


async def test_a_rollout_whose_time_runs_out_names_the_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def agent(seen: Seen) -> aiohttp.web.StreamResponse:
        await ask(http, route)
        raise AssertionError

    async with (
        upstream(HostedAPI(refused=1.0)) as api,
        upstream(agent) as server,
        Gateway() as gateway,
        aiohttp.ClientSession() as http,
        new_client() as client,
    ):
        route = gateway.open(endpoint(api))
        environment: Any = SimpleNamespace(name="e", agents={"solver": "simple_agent"}, agent_processes={})
        running = RolloutRun(environment, "solver", b"{}", route, timeout_s=0.5)
        monkeypatch.setattr(running, "_on_servers", lambda stack: running.post(client, server.url))
        await running.run(SimpleNamespace(gateway=SimpleNamespace(keyless_policy_calls=0)))  # type: ignore[arg-type]
        await route.close()
    assert running.fields["error"]["type"] == "RolloutTimeoutError"
    assert "HTTP 429" in running.fields["error"]["message"]


async def test_a_judges_call_without_a_key_waits_no_longer_than_its_timeout() -> None:
    """No rollout's end cancels it."""
    async with upstream(HostedAPI(refused=1.0)) as api, aiohttp.ClientSession() as http:
        judge = endpoint(api, timeout_s=0.2)
        async with Gateway(judges={"judge": judge}) as gateway, asyncio.timeout(20):
            url = f"http://127.0.0.1:{await gateway.port_for('judge')}/v1/chat/completions"
            async with http.post(url, json=BODY) as response:
                assert response.status == 502
    assert len(api.seen) > 3


async def test_headers_are_sent_and_shown_nowhere() -> None:
    async def script(seen: Seen) -> Any:
        value = seen.headers["X-Gateway-Token"]
        return aiohttp.web.json_response({"error": {"message": f"no {value}"}}, status=403)

    async with upstream(script) as api, Gateway() as gateway, aiohttp.ClientSession() as http:
        headers: Any = {"X-Gateway-Token": "token-of-a-team", "X-Title": "eval"}
        route = gateway.open(endpoint(api, headers=headers))
        status, message = await ask(http, route)
        assert status == 403
        assert "token-of-a-team" not in message
        assert api.seen[0].headers["X-Title"] == "eval"


USED_UP = {
    "openai": {"type": "insufficient_quota", "code": "insufficient_quota"},
    "openai's code": {"type": "requests", "code": "project_spend_limit_exceeded"},
    "an old one": {"type": "insufficient_quota", "code": None},
    "moonshot": {"type": "exceeded_current_quota_error"},
}
PASSING = {
    "openai": {"type": "tokens", "code": "rate_limit_exceeded"},
    "gemini": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": "You exceeded your current quota"},
    "azure": {"code": "429", "message": "Requests have exceeded call rate limit"},
    "a text": "slow down",
}


@pytest.mark.parametrize("name", USED_UP)
def test_what_a_used_up_quota_looks_like(name: str) -> None:
    assert is_quota_used_up(429, {"error": USED_UP[name]})
    assert not is_quota_used_up(500, {"error": USED_UP[name]})


@pytest.mark.parametrize("name", PASSING)
def test_what_a_rate_limit_looks_like(name: str) -> None:
    assert not is_quota_used_up(429, {"error": PASSING[name]})
    assert not is_quota_used_up(429, [PASSING[name]])


def test_a_server_says_when_to_ask_again() -> None:
    assert retry_after_s({}) is None
    assert retry_after_s({"retry-after": "soon"}) is None
    assert retry_after_s({"retry-after": f"Wed, 21 Oct {10**20} 07:28:00 GMT"}) is None
    assert retry_after_s({"retry-after": "2.5"}) == 2.5
    assert retry_after_s({"retry-after": "3", "retry-after-ms": "20"}) == 0.02
    date = retry_after_s({"retry-after": formatdate(time.time() + 30, usegmt=True)})
    assert date is not None
    assert 25 < date <= 31
    assert retry_after_s({"retry-after": formatdate(0, usegmt=True)}) == 0
    assert is_retried(429, {})
    assert not is_retried(429, {"x-should-retry": "false"})
    assert not is_retried(402, {})


async def test_a_server_that_asks_for_no_wait_is_not_asked_without_pause() -> None:
    async def script(seen: Seen) -> web.Response:
        return web.json_response({}, status=429, headers={"Retry-After": "0"})

    async with upstream(script) as api, Gateway() as gateway, aiohttp.ClientSession() as http:
        route = gateway.open(endpoint(api))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await ask(http, route)
        assert 2 <= len(api.seen) < 20


@pytest.mark.parametrize("asked", [None, 0.0])
def test_a_pause_after_many_retries(asked: float | None) -> None:
    failure = Retryable(PolicyError("", status_code=429, retry_after_s=asked))
    assert 0 < failure.delay_s(5000) <= 1
