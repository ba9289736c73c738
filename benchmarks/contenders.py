"""What the benchmarks run rows through: NeMo Gym's own `/run`, and a stack of gymgate over the same servers.

Bare: the same servers, launched the same way, with a policy process as their `policy_model`, and rows posted by a plain
aiohttp client. Only here are the stack's internals imported: NeMo Gym's own launch of the servers is slower, and beside that
gymgate would look better than it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.machine import descendants, pss_mb
from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, ReplayEndpoint, StackConfig
from gymgate.gym.catalog import Catalog
from gymgate.gym.runtime import Runtime
from gymgate.stack import Stack
from gymgate.stack.container_removal import Containers
from gymgate.stack.daemon.forkserver_pool import ForkServerPool
from gymgate.stack.daemon.running_environment import RunningEnvironment, StackContext

ENVIRONMENT = "example_single_tool_call"
LIMIT_S = 60.0
"""Of one contender's round."""
Run = Callable[[dict[str, Any]], Awaitable[float | None]]


class BarePolicy:
    """In the gateway's place: every model server is the scripted policy."""

    def __init__(self, url: str) -> None:
        self.port = urlsplit(url).port

    async def port_for(self, model_server: str) -> int:
        assert self.port is not None
        return self.port


@contextlib.asynccontextmanager
async def bare_agent(runtime: Runtime, policy_url: str) -> AsyncIterator[str]:
    """URL of the agent's `/run`, its servers started as a stack starts them."""
    config = Catalog(runtime.site, runtime.version).find(ENVIRONMENT).config(None)
    with tempfile.TemporaryDirectory(prefix="gymgate-bench-") as name:
        stack = StackConfig(
            environments=(ENVIRONMENT,),
            agent_processes=1,
            max_restarts=0,
            start_timeout_s=60,
            stock_servers=True,
        )
        fork_servers = ForkServerPool(stack, Path(name), _quiet)
        policy: Any = BarePolicy(policy_url)
        context = StackContext(stack, Path(name), policy, fork_servers, Containers(), _quiet)
        spec = EnvironmentConfig(name=ENVIRONMENT)
        environment = RunningEnvironment(spec, [config.path], runtime, context)
        try:
            await environment.start()
            with environment.server_port(environment.plan.default_agent) as port:
                yield f"http://127.0.0.1:{port}/run"
        finally:
            await environment.stop()
            await fork_servers.close()


def _quiet(message: str) -> None:
    pass


async def rate(
    rows: list[dict[str, Any]], rollouts: int, concurrency: int, run: Run, limit_s: float = LIMIT_S
) -> float:
    """Rollouts per second; every one must be scored. None is begun after the limit."""
    numbers = iter(range(rollouts))
    done = 0

    async def worker() -> None:
        nonlocal done
        for number in numbers:
            reward = await run(rows[number % len(rows)])
            assert reward is not None
            done += 1
            if time.perf_counter() - started > limit_s:
                return

    for row in rows:
        await run(row)
    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done / (time.perf_counter() - started)


def bare_run(session: aiohttp.ClientSession, url: str) -> Run:
    async def run(row: dict[str, Any]) -> float | None:
        async with session.post(url, json=row) as response:
            reward: float | None = (await response.json())["reward"]
            return reward

    return run


def stack_run(stack: Stack, policy: HTTPEndpoint | ReplayEndpoint) -> Run:
    async def run(row: dict[str, Any]) -> float | None:
        rollout = await stack.run(row, policy=policy)
        assert rollout.error is None, rollout.error
        return rollout.reward

    return run


async def memory_mb(stack: Stack) -> float:
    """PSS of the daemon and everything below it."""
    daemon = (await stack.status())["pid"]
    return round(sum(pss_mb(pid) for pid in (daemon, *descendants(daemon))), 1)
