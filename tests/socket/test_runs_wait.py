"""Waiting for a policy that comes up late, goes for a while, or never answers."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gymgate.core.config import HTTPEndpoint, StackConfig
from gymgate.core.errors import PolicyError
from gymgate.core.http_client import HTTPClient
from gymgate.gateway.backends.http import HTTPBackend
from gymgate.gateway.backends.ready import wait_until_ready
from gymgate.gym.row_sources import RowSource
from gymgate.rollouts import Rollout, RolloutError
from gymgate.rollouts.row import make_row
from gymgate.runs.collected import run as run_module
from gymgate.runs.collected.policy_wait import PolicyWait
from gymgate.runs.collected.run import Collection
from gymgate.runs.described.pace import Pace
from gymgate.runs.described.plan import PlannedRollout, RolloutPlan
from support.collecting import made_up_run
from support.upstream import Seen, upstream

PROGRAM = Path(__file__).with_name("replica_program.py")
NOWHERE = "http://127.0.0.1:9/v1"


async def answering(status: int) -> aiohttp.web.Response:
    return aiohttp.web.json_response({}, status=status)


@pytest.mark.parametrize(
    ("status", "ready"), [(200, True), (401, True), (404, True), (500, False), (503, False)]
)
async def test_any_answer_but_a_servers_error_is_one(status: int, ready: bool) -> None:
    async def script(seen: Seen) -> aiohttp.web.Response:
        return await answering(status)

    async with upstream(script) as server:
        if ready:
            await wait_until_ready(server.endpoint(), 0)
        else:
            with pytest.raises(PolicyError, match=f"status {status}"):
                await wait_until_ready(server.endpoint(), 0)


async def test_a_server_that_is_loading_is_waited_for() -> None:
    statuses = iter([503, 503, 200])
    lines: list[str] = []

    async def script(seen: Seen) -> aiohttp.web.Response:
        return await answering(next(statuses))

    async with upstream(script) as server:
        await wait_until_ready(server.endpoint(), 20, lines.append)
    assert len(server.seen) == 3
    (line,) = lines
    assert "20 s" in line
    assert f"({server.url}: status 503)" in line


async def test_the_wait_has_an_end() -> None:
    started = time.monotonic()
    with pytest.raises(PolicyError, match=r"\b0\.6 s \(http://127\.0\.0\.1:9/v1: "):
        await wait_until_ready(HTTPEndpoint(base_url=NOWHERE), 0.6)
    assert time.monotonic() - started < 5


async def test_one_of_several_replicas_is_enough_at_the_deadline() -> None:
    lines: list[str] = []
    async with upstream() as server:
        await wait_until_ready(HTTPEndpoint(base_url=NOWHERE, replicas=(server.url,)), 0, lines.append)
    assert "1 of 2 replicas (http://127.0.0.1:9/v1: " in lines[-1]


async def test_a_replica_that_stays_away_is_not_waited_for_in_the_middle_of_a_run() -> None:
    error = RolloutError(kind="policy", message="x", type="PolicyError", retryable=True)
    async with upstream() as server:
        endpoint = HTTPEndpoint(base_url=NOWHERE, replicas=(server.url,))
        async with asyncio.timeout(10):
            await PolicyWait(endpoint, 1000, lambda line: None).after(error)


async def test_a_rollout_that_is_cancelled_leaves_the_wait_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RolloutError(kind="policy", message="x", type="PolicyError", retryable=True)
    asked, up = asyncio.Event(), asyncio.Event()

    async def wait(*_: Any, **__: Any) -> None:
        asked.set()
        await up.wait()

    monkeypatch.setattr("gymgate.runs.collected.policy_wait.wait_until_ready", wait)
    policy_wait = PolicyWait(HTTPEndpoint(base_url=NOWHERE), 1000, lambda line: None)
    first, second = (asyncio.create_task(policy_wait.after(error)) for _ in range(2))
    await asked.wait()
    first.cancel()
    await asyncio.wait([first])
    up.set()
    async with asyncio.timeout(30):
        await second


async def test_a_policy_that_is_gone_for_a_while_costs_no_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting, the budget of 3 would be spent at once; the server comes back on its old port."""
    monkeypatch.setattr(run_module, "wait_s", lambda failures: 0.0)
    process, port = await start(0)
    endpoint = HTTPEndpoint(base_url=f"http://127.0.0.1:{port}/v1", max_retries=0)
    client = HTTPClient()
    backend = HTTPBackend(endpoint, client)
    gone = asyncio.Event()

    async def run_one(planned: PlannedRollout) -> Rollout:
        if progress.finished == 20 and not gone.is_set():
            gone.set()
        try:
            await backend.call({"model": "m", "messages": [{"role": "user", "content": "x"}]})
        except PolicyError as error:
            failed = RolloutError(kind="policy", message=error.message, type="PolicyError", retryable=True)
            return Rollout(id="x", environment="e", agent="a", status="failed", error=failed)
        return Rollout(id="x", environment="e", agent="a", status="completed", reward=1.0)

    rows = [
        make_row({"responses_create_params": {"input": f"{number}"}}, "r", number) for number in range(60)
    ]
    noticed = asyncio.Event()
    plan = RolloutPlan([RowSource(rows, "e")])
    work = made_up_run(plan, run_one, policy=endpoint, pace=Pace(4), wait_for_policy_s=30)
    work.log = lambda line: noticed.set() if gone.is_set() else None
    progress = work.progress
    running = asyncio.create_task(work.run())
    await gone.wait()
    process.kill()
    await process.wait()
    await noticed.wait()
    process, _ = await start(port)
    try:
        await running
    finally:
        process.kill()
        await process.wait()
        await client.close()
    assert (progress.finished, progress.failed) == (60, 0)
    assert progress.attempts_failed


async def test_draining_ends_the_wait_in_the_middle_of_a_run() -> None:
    process, port = await start(0)

    async def run_one(planned: PlannedRollout) -> Rollout:
        if process.returncode is None:
            process.kill()
        await process.wait()
        error = RolloutError(kind="policy", message="x", type="PolicyError", retryable=True)
        return Rollout(id="x", environment="e", agent="a", status="failed", error=error)

    endpoint = HTTPEndpoint(base_url=f"http://127.0.0.1:{port}/v1", model="m", max_retries=0)
    work = made_up_run(plan_of(3), run_one, policy=endpoint, pace=Pace(4), wait_for_policy_s=1000)
    work.log = lambda line: work.drain() if process.returncode is not None else None
    progress = work.progress
    async with asyncio.timeout(10):
        await work.run()
    assert (progress.finished, progress.failed, progress.attempts_failed) == (0, 0, 3)


async def test_draining_ends_the_wait_at_the_start(tmp_path: Path) -> None:
    """Nothing is started then."""
    run = collection_of(plan_of(3), tmp_path, HTTPEndpoint(base_url=NOWHERE, model="m"))
    run.wait_for_policy_s = 1000
    run.log = lambda line: run.drain()
    async with asyncio.timeout(10):
        await run.run()
    assert run.draining
    assert (run.progress.left, run.in_flight) == (3, {})


def plan_of(count: int) -> RolloutPlan:
    rows = [
        make_row({"responses_create_params": {"input": f"{number}"}}, "r", number) for number in range(count)
    ]
    return RolloutPlan([RowSource(rows, "e")])


def collection_of(plan: RolloutPlan, output: Path, policy: HTTPEndpoint) -> Collection:
    return Collection(StackConfig(environments=("mcqa",)), policy, plan, output=output)


async def start(port: int) -> tuple[asyncio.subprocess.Process, int]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROGRAM),
        stdout=asyncio.subprocess.PIPE,
        env={"PORT": str(port), "PYTHONPATH": str(PROGRAM.parents[1])},
    )
    assert process.stdout is not None
    return process, int(await process.stdout.readline())


async def test_a_policy_that_stays_away_ends_the_run() -> None:
    wait = PolicyWait(HTTPEndpoint(base_url=NOWHERE), 0.1, lambda line: None)
    error = RolloutError(kind="policy", message="x", type="PolicyError", retryable=True)
    with pytest.raises(PolicyError, match=r"^stopped: .*http://127\.0\.0\.1:9/v1"):
        await wait.after(error)
    await wait.after(error.model_copy(update={"retryable": False}))
    await wait.after(error.model_copy(update={"kind": "environment"}))
    await PolicyWait(HTTPEndpoint(base_url=NOWHERE), 0, lambda line: None).after(error)
