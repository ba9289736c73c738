"""Ports of an agent process, for agents that cannot forward the key: one rollout at a time holds them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from gymgate.gateway.server import Gateway
from support.upstream import Seen, upstream

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway() as running:
        yield running


async def post(port: int, body: dict[str, Any] = BODY, prefix: str = "/v1") -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"http://127.0.0.1:{port}{prefix}/chat/completions", json=body) as response,
    ):
        return response.status, await response.json()


async def test_a_call_is_that_of_the_rollout_which_holds_the_agents_ports(gateway: Gateway) -> None:
    """Ports of an agent process, for agents that cannot forward the key: one rollout at a time holds them."""
    async with upstream() as policy, upstream() as judge:
        first, second = gateway.agent_ports(), gateway.agent_ports()
        policy_ports = [await each.port_for("policy_model") for each in (first, second)]
        judging = await first.port_for("judge_model")
        routes = [gateway.open(policy.endpoint(), judges={"judge_model": judge.endpoint()}) for _ in range(2)]
        first.route, second.route = routes
        assert [(await post(port))[0] for port in (*policy_ports, judging)] == [200, 200, 200]
        assert [call.model_server for call in routes[0].calls] == ["policy_model", "judge_model"]
        assert [call.model_server for call in routes[1].calls] == ["policy_model"]
        assert len({*policy_ports, judging, gateway.port}) == 4


async def test_a_url_of_the_agents_config_can_stand_for_the_policy(gateway: Gateway) -> None:
    async with upstream() as policy:
        ports = gateway.agent_ports()
        port = await ports.port_for("policy_base_url", "policy_model")
        ports.route = gateway.open(policy.endpoint())
        assert (await post(port))[0] == 200
        assert [call.model_server for call in ports.route.calls] == ["policy_model"]


@pytest.mark.parametrize("held", [False, True], ids=["free", "by a rollout that has ended"])
async def test_a_call_without_a_rollout_is_refused(gateway: Gateway, held: bool) -> None:
    async with upstream() as policy:
        ports = gateway.agent_ports()
        port = await ports.port_for("policy_model")
        if held:
            ports.route = gateway.open(policy.endpoint())
            await ports.route.close()
        status, body = await post(port)
        assert (status, policy.seen) == (404, [])
        assert "agent process" in body["error"]["message"]


async def test_a_key_goes_before_the_agents_ports(gateway: Gateway) -> None:
    """Ports of an agent process, for agents that cannot forward the key: one rollout at a time holds them."""
    async with upstream() as policy:
        ports = gateway.agent_ports()
        port = await ports.port_for("policy_model")
        gone, ports.route = gateway.open(policy.endpoint()), gateway.open(policy.endpoint())
        await gone.close()
        assert (await post(port, prefix=f"/ng-rollout/{gone.key}/v1"))[0] == 404
        assert ports.route.calls == []


async def test_usage_that_lacks_details_is_completed() -> None:
    """Ports of an agent process, for agents that cannot forward the key: one rollout at a time holds them."""

    async def script(seen: Seen) -> aiohttp.web.Response:
        usage = {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
        return aiohttp.web.json_response({"id": "r", "output": [], "usage": usage, "vendor": 1.5})

    async with upstream(script) as policy, Gateway() as gateway, aiohttp.ClientSession() as http:
        route = gateway.open(policy.endpoint(dialect="responses"))
        async with http.post(f"{route.base_url}/responses", json={"input": "hi"}) as response:
            answer = await response.json()
    assert answer["vendor"] == 1.5
    assert answer["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }
