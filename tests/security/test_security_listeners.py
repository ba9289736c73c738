"""Who can reach a stack: nobody beyond the machine, and nobody without a live key."""

from __future__ import annotations

import asyncio
import re

import aiohttp
import pytest

from gymgate.errors import StackLostError
from gymgate.stack import acquire
from gymgate.stack.forkserver import descendants
from support.stacks import LOOPBACK, ROW, SIMPLE, call_then_answer, listening, pids_of, stack_config


@pytest.mark.gym
async def test_everything_listens_on_loopback_and_needs_a_live_key() -> None:
    async with acquire(stack_config()) as stack, aiohttp.ClientSession() as http:
        status = await stack.status()
        pids = {status["pid"], *descendants(status["pid"])}
        assert pids >= set(pids_of(status))
        assert all(listening(pid) for pid in {*pids_of(status)} - {*status["fork_servers"]})
        found = set().union(*(listening(pid) for pid in pids))
        assert found <= LOOPBACK
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        first, second = await stack.open_route(policy), await stack.open_route(policy)
        body = {"input": "hi"}
        for url, expected in (
            (f"{first.base_url}/responses", 200),
            (f"{stack.gateway_url}/v1/responses", 401),
            (f"{stack.gateway_url}/ng-rollout/{'0' * 32}/v1/responses", 404),
        ):
            async with http.post(url, json=body) as response:
                assert response.status == expected
        assert len(await first.calls()) == 1
        assert await second.calls() == []
        await first.close()
        answers = []
        for key in (first.key, "f" * 32):
            async with http.post(f"{stack.gateway_url}/ng-rollout/{key}/v1/responses", json=body) as response:
                answers.append((response.status, await response.read(), response.headers["Content-Type"]))
        assert answers[0] == answers[1], "a retired key must look like one that never was"


@pytest.mark.gym
async def test_one_connections_routes_are_not_anothers() -> None:
    """Another lease of the same stack cannot read or close a route, even if it knows the key."""
    config = stack_config()
    async with acquire(config) as mine:
        policy = mine.register("scripted", call_then_answer, dialect="responses")
        route = await mine.open_route(policy)
        await asyncio.to_thread(asyncio.run, try_from_elsewhere(config, route._name))
        assert await route.calls() == []
        rollout = await mine.run(ROW, policy=policy, environment=SIMPLE)
        assert rollout.error is None


async def try_from_elsewhere(config: object, name: str) -> None:
    async with acquire(config) as other:  # type: ignore[arg-type]
        with pytest.raises(StackLostError):
            await other._last.peer.call("route_calls", name=name)
        await other._last.peer.call("close_route", name=name)


def test_keys_have_128_random_bits() -> None:
    from gymgate.gateway.route import Route

    keys = {Route({}, base_url="", rollout_id=None).key for _ in range(1000)}
    assert len(keys) == 1000
    assert all(re.fullmatch(r"[0-9a-f]{32}", key) for key in keys)
