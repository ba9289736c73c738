"""Rollouts/s through `Stack.run` beside posting to the agent's own `/run`; start time and memory of a stack.

    ./dev python -m benchmarks.stack [--rollouts 500] [--concurrency 20] [--interpreter PYTHON]

Bare: the same servers, launched the same way, with a scripted policy process as their `policy_model`, and rows
posted by a plain aiohttp client. Everything is measured in one run, the contenders in turn, NeMo Gym's own
`gym env start` and `gym eval run` last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.gym_collector import stock_stack
from benchmarks.machine import describe, pss_mb
from benchmarks.scripted_policy import scripted_policy
from gymgate.catalog import Catalog
from gymgate.config import EnvironmentConfig, HTTPEndpoint, ReplayEndpoint, RuntimeConfig, StackConfig
from gymgate.runtime import Runtime, clean_env, ensure_runtime
from gymgate.stack import Stack, acquire
from gymgate.stack.environment import Environment, Host
from gymgate.stack.forkserver import descendants
from gymgate.stack.spawner import Spawner

ENVIRONMENT = "example_single_tool_call"
FOUR = (ENVIRONMENT, "example_session_state_mgmt", "example_multi_step", "workplace_assistant")
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
        spawner = await Spawner.start(runtime.python, clean_env(), Path(name))

        async def get_spawner() -> Spawner:
            return spawner

        async def no_ray(_: Spawner) -> str:
            raise RuntimeError("not needed")

        host = Host(
            spawner=get_spawner,
            ray_address=no_ray,
            gateway=BarePolicy(policy_url),  # type: ignore[arg-type]
            version=runtime.version,
            site=runtime.site,
            component_roots=(),
            directory=Path(name),
            cache_dir=Path(name),
            start_timeout_s=60,
            max_restarts=0,
            progress=lambda _: None,
        )
        environment = Environment(EnvironmentConfig(name=ENVIRONMENT), config.path, host)
        try:
            await environment.start()
            assert environment.default_agent is not None
            yield f"http://127.0.0.1:{environment.port(environment.default_agent)}/run"
        finally:
            await environment.stop()
            await spawner.close()


async def rate(rows: list[dict[str, Any]], rollouts: int, concurrency: int, run: Run) -> float:
    """Rollouts per second; every one must be scored."""
    numbers = iter(range(rollouts))

    async def worker() -> None:
        for number in numbers:
            reward = await run(rows[number % len(rows)])
            assert reward is not None

    for row in rows:
        await run(row)
    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return rollouts / (time.perf_counter() - started)


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


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    runtime_config = RuntimeConfig(interpreter=args.interpreter)
    runtime = await asyncio.to_thread(ensure_runtime, runtime_config)
    environment = Catalog(runtime.site, runtime.version).find(ENVIRONMENT)
    rows = [json.loads(line) for line in environment.data_file().path.read_text().splitlines()]
    replay = ReplayEndpoint(rollouts=tuple(str(file.path) for file in environment.recordings()))
    figures: dict[str, Any] = {"machine": describe("aiohttp")}
    for count in (1, 4):
        config = StackConfig(environments=FOUR[:count], runtime=runtime_config)
        started = time.perf_counter()
        async with acquire(config) as stack:
            figures[f"start_s_{count}"] = round(time.perf_counter() - started, 2)
            figures[f"memory_mb_{count}"] = await memory_mb(stack)
    config = StackConfig(environments=(ENVIRONMENT,), runtime=runtime_config)
    with scripted_policy() as url:
        responses = HTTPEndpoint(base_url=url, dialect="responses")
        chat = HTTPEndpoint(base_url=url, dialect="chat")
        async with (
            bare_agent(runtime, url) as agent,
            acquire(config) as stack,
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
        ):
            contenders = {
                "bare": bare_run(session, agent),
                "stack, responses": stack_run(stack, responses),
                "stack, chat": stack_run(stack, chat),
                "stack, replay": stack_run(stack, replay),
            }
            for _ in range(args.rounds):
                for name, run in contenders.items():
                    if args.only and args.only not in name and name != "bare":
                        continue
                    found = await rate(rows, args.rollouts, args.concurrency, run)
                    figures.setdefault(f"rollouts_per_s: {name}", []).append(round(found, 1))
            figures["memory_mb_1_after"] = await memory_mb(stack)
        if not args.without_stock:
            figures |= await asyncio.to_thread(measure_stock, url, args)
    return figures


def measure_stock(policy_url: str, args: argparse.Namespace) -> dict[str, Any]:
    """NeMo Gym's own launcher and collector, on the same machine right after the others."""
    with stock_stack(policy_url) as stock:
        rates = [round(stock.collect(args.rollouts, args.concurrency), 1) for _ in range(args.rounds)]
        return {
            "start_s: gym env start, 1 environment": round(stock.start_s, 2),
            "memory_mb: gym env start, 1 environment": round(stock.memory_mb, 1),
            "processes: gym env start": stock.processes,
            "rollouts_per_s: gym eval run": rates,
        }


async def memory_mb(stack: Stack) -> float:
    """PSS of the daemon and everything below it."""
    daemon = (await stack.status())["pid"]
    return round(sum(pss_mb(pid) for pid in (daemon, *descendants(daemon))), 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--interpreter", help="one that has nemo-gym; default: gymgate's own runtime")
    parser.add_argument("--without-stock", action="store_true", help="leave NeMo Gym's own command out")
    parser.add_argument("--only", help="contenders whose name contains this, beside the bare one")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
