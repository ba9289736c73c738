"""Servers and policies that hang or talk nonsense: every rollout ends by its deadline, typed, and no other one is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from gymgate.core.config import CallableEndpoint, EnvironmentConfig, HTTPEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import StackLostError
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire
from gymgate.stack.client import stack as client
from support.faulty import FAULTS, VERIFY_FAULTS, failing, obedient, row
from support.ledger import all_gone, held, idle
from support.stacks import ROW, SESSIONS, SIMPLE, call_then_answer, name_of, pids_of, server_pid, stack_config
from support.upstream import Script, Seen, drop_midway, responses_answer, upstream

pytestmark = pytest.mark.gym

DEADLINE_S = 3.0
LATE_S = 1.5
"""What a busy machine may add to a deadline."""
KEY = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
"""Of any rollout."""
LIMITS = RolloutLimits(timeout_s=DEADLINE_S)
SESSION_ROW = {**ROW, "initial_count": 1, "expected_count": 1}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> EnvironmentConfig:
    """Fails as told."""
    return failing(tmp_path_factory.mktemp("failing"))


@pytest.fixture(scope="module")
def shared(environment: EnvironmentConfig) -> Iterator[StackConfig]:
    """The config of a stack that stays up beside these tests."""
    config = stack_config(SIMPLE, SESSIONS, environment)
    with held(config):
        yield config


def scripted(stack: Stack) -> CallableEndpoint:
    return stack.register("scripted", call_then_answer, dialect="responses")


async def healthy(stack: Stack, until: asyncio.Event) -> list[Rollout]:
    """Rollouts of an environment that has no part in what goes on, one after another."""
    found: list[Rollout] = []
    while not until.is_set() or not found:
        found.append(await stack.run(ROW, policy=scripted(stack), environment=SIMPLE))
    return found


@contextlib.asynccontextmanager
async def none_harmed(stack: Stack) -> AsyncIterator[None]:
    """Beside what happens in the block, rollouts of `SIMPLE` all get their reward; after it, nothing is open."""
    done = asyncio.Event()
    beside = asyncio.create_task(healthy(stack, done))
    try:
        yield
    finally:
        done.set()
        rollouts = await beside
    assert [rollout.reward for rollout in rollouts] == [1.0] * len(rollouts)
    assert not any(rollout.error for rollout in rollouts)
    await idle(stack)


async def timed(stack: Stack, prompt: str) -> tuple[Rollout, float]:
    policy = stack.register("obedient", obedient, dialect="responses")
    started = time.monotonic()
    rollout = await stack.run(
        row(prompt), policy=policy, agent="failing_agent", limits=LIMITS, rollout_id=prompt
    )
    assert not KEY.search(rollout.model_dump_json()), rollout.id  # this agent has it in every URL
    return rollout, time.monotonic() - started


async def test_an_environments_server_that_fails_in_every_way(shared: StackConfig) -> None:
    """In a tool call the agent may go on with what it got; where verification fails there is no reward, not even 0."""
    async with acquire(shared) as stack, none_harmed(stack):
        fine, _ = await timed(stack, "fine")
        assert (fine.reward, fine.error) == (0.5, None)
        tools = [timed(stack, f"tool:{fault}") for fault in FAULTS]
        verifying = [timed(stack, f"verify:{fault}") for fault in VERIFY_FAULTS]
        found = await asyncio.gather(*tools, *verifying)
        for rollout, took_s in found:
            check_bounded(rollout, took_s, may_go_on=rollout.id.startswith("tool"))
        [unscored] = [rollout.error for rollout, _ in found if rollout.id == "verify:no reward"]
        assert "gave no number as a reward" in unscored.message
        again, _ = await timed(stack, "fine")
        assert (again.reward, again.error) == (0.5, None)


def check_bounded(rollout: Rollout, took_s: float, *, may_go_on: bool) -> None:
    """It ended by its deadline, and where it failed there is a typed error of one line and no reward."""
    assert took_s < DEADLINE_S + LATE_S, rollout.id
    if may_go_on and rollout.error is None:
        return
    assert rollout.status == "failed", rollout.id
    assert rollout.reward is None, rollout.id
    assert rollout.error is not None, rollout.id
    assert rollout.error.kind in ("environment", "timeout", "infrastructure"), rollout.error
    assert "\n" not in rollout.error.message


async def test_an_agents_server_that_fails_in_every_way(shared: StackConfig) -> None:
    """Each of them before it asks the policy, so that even an answer without a reward is a failure."""
    async with acquire(shared) as stack, none_harmed(stack):
        for rollout, took_s in await asyncio.gather(
            *(timed(stack, f"run:{fault}") for fault in (*FAULTS, "NaN", "no reward"))
        ):
            check_bounded(rollout, took_s, may_go_on=False)
        again, _ = await timed(stack, "fine")
        assert (again.reward, again.error) == (0.5, None)


async def silence(seen: Seen) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def garbage(seen: Seen) -> web.StreamResponse:
    return web.Response(body=b"\x00\xff<html>" * 100, content_type="application/json")


async def drip(seen: Seen) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(seen.request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.1)


async def storm(seen: Seen) -> web.StreamResponse:
    return web.Response(status=500, text="on purpose")


async def busy(seen: Seen) -> web.StreamResponse:
    return web.Response(status=429, headers={"Retry-After": "3600"})


POLICIES: dict[str, Script] = {
    "silence": silence,
    "garbage": garbage,
    "drip": drip,
    "reset": drop_midway,
    "storm": storm,
    "busy for an hour": busy,
}


async def fails(stack: Stack, name: str, limited: bool) -> None:
    """A rollout whose policy fails so, by the endpoint's own limit or by the rollout's."""
    async with upstream(POLICIES[name]) as policy:
        endpoint = policy.endpoint(dialect="responses", timeout_s=1.0 if limited else 60.0, max_retries=1)
        started = time.monotonic()
        rollout = await stack.run(SESSION_ROW, policy=endpoint, environment=SESSIONS, limits=LIMITS)
        assert time.monotonic() - started < DEADLINE_S + LATE_S, name
        assert (rollout.status, rollout.reward) == ("failed", None), name
        assert rollout.error is not None
        assert rollout.error.kind in ("policy", "timeout"), (name, rollout.error)


async def test_a_policy_that_fails_in_every_way(shared: StackConfig) -> None:
    async with acquire(shared) as stack, none_harmed(stack):
        cases = [(name, limited) for name in POLICIES for limited in (True, False)]
        await asyncio.gather(*(fails(stack, name, limited) for name, limited in cases))
        await late_answers(stack)


async def late_answers(stack: Stack) -> None:
    """Policies that answer when their rollout was cancelled: nothing is recorded, nothing else gets the answer."""
    asked, opened = asyncio.Event(), asyncio.Event()

    async def late(seen: Seen) -> web.StreamResponse:
        if asked.is_set():
            return web.json_response(responses_answer("in time"))
        asked.set()
        await opened.wait()
        return web.json_response(responses_answer("too late"))

    async with upstream(late) as policy:
        endpoint: HTTPEndpoint = policy.endpoint(dialect="responses")
        running = asyncio.create_task(stack.run(SESSION_ROW, policy=endpoint, environment=SESSIONS))
        await asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        opened.set()
        again = await stack.run(SESSION_ROW, policy=endpoint, environment=SESSIONS, record_bodies=True)
        assert len(policy.seen) == 1 + len(again.policy_calls)
        assert all("in time" in str(call.response) for call in again.policy_calls)


async def test_stopped_servers_are_waited_for_until_the_deadline(shared: StackConfig) -> None:
    """SIGSTOP: a hang, not a death. Going on, they serve again."""
    async with acquire(shared) as stack:
        status = await stack.status()
        limits = RolloutLimits(timeout_s=1.5)
        for server in status["environments"][SESSIONS]["servers"]:
            pid = server_pid(status, SESSIONS, server)
            async with none_harmed(stack):
                os.kill(pid, signal.SIGSTOP)
                started = time.monotonic()
                jobs = [
                    stack.run(SESSION_ROW, policy=scripted(stack), environment=SESSIONS, limits=limits)
                    for _ in range(3)
                ]
                for rollout in await asyncio.gather(*jobs):
                    assert rollout.error is not None
                    assert (rollout.error.kind, rollout.reward) == ("timeout", None)
                assert time.monotonic() - started < 1.5 + LATE_S
                os.kill(pid, signal.SIGCONT)
            again = await stack.run(SESSION_ROW, policy=scripted(stack), environment=SESSIONS)
            assert again.error is None


async def test_a_stopped_daemon_is_noticed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By who waits for it; whoever acquires the stack next gets another, whose servers hold up no end when they are stopped."""
    assert client.PING_S * (1 + client.MAX_MISSED) <= 60
    async with acquire(stack_config(SIMPLE)) as stack:
        monkeypatch.setattr(client, "PING_S", 0.1)
        stack._lease._watch(0, 0)
        gate, asked = asyncio.Event(), asyncio.Event()

        async def wait(body: dict[str, object]) -> dict[str, object]:
            asked.set()
            await gate.wait()
            return {}

        running = asyncio.create_task(stack.run(ROW, policy=wait))
        await asked.wait()
        await asyncio.sleep(1.0)
        assert not running.done()  # a rollout that takes its time is no sign of anything
        status = await stack.status()
        os.kill(status["pid"], signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(StackLostError):
            await running
        assert time.monotonic() - started < 3
        monkeypatch.undo()
        assert await all_gone(pids_of(status))
        async with acquire(stack_config(SIMPLE)) as other:
            assert (await other.run(ROW, policy=scripted(other))).reward == 1.0
            for pid in (pids := pids_of(await other.status()))[1:]:
                os.kill(pid, signal.SIGSTOP)
            started = time.monotonic()
        assert time.monotonic() - started < 8
        assert await all_gone(pids)


async def test_waiting_for_a_restart_counts(shared: StackConfig, environment: EnvironmentConfig) -> None:
    """Servers are restarted for most of a rollout's time, and then do not answer: it ends by its deadline all the same."""
    async with acquire(shared) as stack:
        status = await stack.status()
        app = Path(environment.name).parents[1] / "app.py"
        app.write_text("import time\ntime.sleep(1.5)\n" + app.read_text())
        name = name_of(stack, environment.name)
        os.kill(server_pid(status, name, "failing"), signal.SIGKILL)
        while (await stack.status())["environments"][name]["state"] == "up":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        rollout, took_s = await timed(stack, "verify:silence")
        assert rollout.error is not None
        assert rollout.error.kind == "timeout"
        assert "3 s" in rollout.error.message
        assert took_s < DEADLINE_S + 0.5
