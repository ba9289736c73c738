"""Gym's remote agent: a service of the user's, which finds its rollout's policy by what comes with the row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gymgate.stack import acquire
from support.agents import TOOLS, StampingPolicy, environment_with, stamped_row
from support.stacks import stack_config


async def answer(request: web.Request) -> web.Response:
    """What a service does: ask the model where the metadata says, as it is or with the base URL passed on in it."""
    body = await request.json()
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{body['metadata']['gymgate_route']}/responses", json=body) as response:
            await response.read()
        base = body["metadata"]["gymgate_route"].partition("/ng-rollout/")[0]
        async with http.post(f"{base}/v1/responses", json=body) as response:
            return web.json_response(await response.json(), status=response.status)


@asynccontextmanager
async def service() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/responses", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.gym
async def test_a_remote_service_asks_its_rollouts_policy(tmp_path: Path) -> None:
    async with service() as url:
        path = environment_with(tmp_path, "remote_agent", agent_base_url=url, model_server=None)
        policies = [StampingPolicy(number, TOOLS) for number in range(1, 9)]
        async with acquire(stack_config(path)) as stack:
            rollouts = await asyncio.gather(
                *(stack.run(stamped_row(each.number), policy=each) for each in policies)
            )
    for rollout, policy in zip(rollouts, policies, strict=True):
        assert (rollout.error, rollout.reward, policy.seen) == (None, 1.0, {policy.number})
        assert len(rollout.policy_calls) == policy.calls == 2
        assert "gymgate_route" not in str(rollout.result)
