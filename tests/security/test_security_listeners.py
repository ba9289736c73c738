"""Who can reach a stack: nobody beyond the machine, and nobody without a live key."""

from __future__ import annotations

import re

import aiohttp
import pytest

from gymgate.gym.inside.forkserver import descendants
from gymgate.stack import acquire
from support.stacks import LOOPBACK, listening, pids_of, stack_config


@pytest.mark.gym
async def test_everything_listens_on_loopback_and_needs_a_live_key() -> None:
    async with acquire(stack_config()) as stack, aiohttp.ClientSession() as http:
        status = await stack.status()
        pids = {status["pid"], *descendants(status["pid"])}
        assert pids >= set(pids_of(status))
        assert all(listening(pid) for pid in {*pids_of(status)} - {*status["fork_servers"]})
        found = set().union(*(listening(pid) for pid in pids))
        assert found <= LOOPBACK
        for path, expected in (("/v1", 401), (f"/ng-rollout/{'0' * 32}/v1", 404)):
            url = f"{stack.gateway_url}{path}/responses"
            async with http.post(url, json={"input": "hi"}) as response:
                assert response.status == expected


def test_keys_have_128_random_bits() -> None:
    from gymgate.gateway.route import Route

    keys = {Route({}, base_url="", rollout_id=None).key for _ in range(1000)}
    assert len(keys) == 1000
    assert all(re.fullmatch(r"[0-9a-f]{32}", key) for key in keys)
