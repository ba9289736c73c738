"""Servers that hang while rollouts need them: found, killed and replaced; those that compute or wait a while are left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from test_faults_hangs import none_harmed

from gymgate.core.config import RolloutLimits, StackConfig
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire
from support.agents import TOOLS, StampingPolicy, environment_with_forgetful_agent, stamped_row
from support.faulty import failing, obedient, row
from support.ledger import held
from support.stacks import SIMPLE, name_of, server_pid, stack_config

pytestmark = pytest.mark.gym

GIVEN_S = 1.5
FOUND_S = 15.0
"""In which a hang is found: what a server is given, three looks, and what a busy machine adds."""
LIMITS = RolloutLimits(timeout_s=60)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """An environment that fails as told, and one whose agent has a process for each rollout."""
    directory = tmp_path_factory.mktemp("places")
    return failing(directory).name, environment_with_forgetful_agent(directory)


@pytest.fixture(scope="module")
def shared(places: tuple[str, str]) -> Iterator[StackConfig]:
    """The config of a stack that stays up beside these tests."""
    config = stack_config(
        SIMPLE, *places, agent_processes=1, hang_timeout_s=GIVEN_S, max_restarts=10, restart_window_s=1.0
    )
    with held(config):
        yield config


async def restarts(stack: Stack, place: str) -> int:
    return int((await stack.status())["environments"][name_of(stack, place)]["restarts"])


async def run(stack: Stack, prompt: str) -> Rollout:
    policy = stack.register("obedient", obedient, dialect="responses")
    return await stack.run(row(prompt), policy=policy, agent="failing_agent", limits=LIMITS)


def check_hung(rollout: Rollout, server: str) -> None:
    assert rollout.error is not None
    assert (rollout.error.type, rollout.error.kind) == ("ServerDiedError", "infrastructure")
    assert server in rollout.error.message
    assert "hung: " in rollout.error.message
    assert rollout.reward is None


async def test_servers_that_hang_are_replaced(shared: StackConfig, places: tuple[str, str]) -> None:
    """Stopped, or in a deadlock: rollouts fail as infrastructure long before their deadline, the next ones are served."""
    async with acquire(shared) as stack:
        for server in ("failing", "failing_agent", "deadlock"):
            before = await restarts(stack, places[0])
            async with none_harmed(stack):
                started = time.monotonic()
                if server == "deadlock":
                    found = await asyncio.gather(run(stack, "fine"), run(stack, "verify:deadlock"))
                    check_hung(found[1], "'failing'")
                    if found[0].error is None:  # it was through before the other one got there
                        assert found[0].reward == 0.5
                    else:
                        check_hung(found[0], "'failing'")
                else:
                    pid = server_pid(await stack.status(), name_of(stack, places[0]), server)
                    os.kill(pid, signal.SIGSTOP)
                    for rollout in await asyncio.gather(*(run(stack, "fine") for _ in range(3))):
                        check_hung(rollout, repr(server))
                assert time.monotonic() - started < FOUND_S
                assert (await run(stack, "fine")).reward == 0.5
                assert await restarts(stack, places[0]) == before + 1


async def test_servers_that_compute_or_wait_are_left_alone(
    shared: StackConfig, places: tuple[str, str]
) -> None:
    """However long they compute, in their only thread or in a process that this waits for."""
    async with acquire(shared) as stack:
        before = await restarts(stack, places[0])
        for fault in ("compute", "let compute", "wait"):
            rollout = await run(stack, f"verify:{fault}")
            assert (rollout.reward, rollout.error) == (0.5, None), fault
        assert await restarts(stack, places[0]) == before


async def test_a_fork_server_that_hangs_is_replaced(shared: StackConfig) -> None:
    """With its servers, one of which has died meanwhile and could not be reported."""
    async with acquire(shared) as stack:
        before, status = await restarts(stack, SIMPLE), await stack.status()
        (fork_server,) = status["fork_servers"]
        os.kill(fork_server, signal.SIGSTOP)
        os.kill(server_pid(status, SIMPLE, SIMPLE), signal.SIGKILL)
        async with asyncio.timeout(FOUND_S):
            while await restarts(stack, SIMPLE) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        async with none_harmed(stack):
            status = await stack.status()
        assert status["fork_servers"] != [fork_server]


async def test_an_agent_process_that_hangs_is_its_rollouts_failure(
    shared: StackConfig, places: tuple[str, str]
) -> None:
    """But not while a model call of its rollout has no answer: it may wait for that, and do nothing else."""
    place = places[1]
    async with acquire(shared) as stack:
        before = await restarts(stack, place)
        policy, asked, gate = StampingPolicy(1, TOOLS), asyncio.Event(), asyncio.Event()

        async def waits(request: dict[str, Any]) -> dict[str, Any]:
            asked.set()
            await gate.wait()
            return await policy(request)

        running = asyncio.create_task(
            stack.run(stamped_row(1), policy=waits, environment=place, limits=LIMITS)
        )
        await asked.wait()
        status, name = await stack.status(), name_of(stack, place)
        (process,) = (server for server in status["environments"][name]["servers"] if " process " in server)
        os.kill(server_pid(status, name, process), signal.SIGSTOP)
        await asyncio.wait([running], timeout=2 * GIVEN_S)
        assert not running.done()
        gate.set()
        async with asyncio.timeout(FOUND_S):
            check_hung(await running, repr(process))
        assert (await stack.run(stamped_row(1), policy=policy, environment=place)).reward == 1.0
        assert await restarts(stack, place) == before
