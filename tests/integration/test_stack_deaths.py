"""Processes of a real stack that die: who notices, who goes on, who is left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import CallableEndpoint
from gymgate.core.errors import ServerDiedError, StackLostError, StackStartError
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire
from support.faulty import faulty
from support.stacks import (
    ROW,
    SESSIONS,
    SIMPLE,
    all_gone,
    call_then_answer,
    name_of,
    pids_of,
    server_pid,
    stack_config,
)

pytestmark = pytest.mark.gym

AGENT = f"{SIMPLE}_simple_agent"
SESSION_ROW = {**ROW, "initial_count": 3, "expected_count": 3}


class Gate:
    """A policy that waits in its first call until it is opened."""

    def __init__(self, stack: Stack) -> None:
        self.asked = asyncio.Event()
        self.opened = asyncio.Event()
        self.endpoint = stack.register(f"gate-{id(self)}", self.answer, dialect="responses")

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.set()
        await self.opened.wait()
        return call_then_answer(body)


def scripted(stack: Stack) -> CallableEndpoint:
    return stack.register("scripted", call_then_answer, dialect="responses")


async def killed_while_in_flight(stack: Stack, server: str) -> Rollout:
    """A rollout of `SIMPLE` whose server is killed during its first model call."""
    gate = Gate(stack)
    running = asyncio.create_task(stack.run(ROW, policy=gate.endpoint, environment=SIMPLE))
    await gate.asked.wait()
    os.kill(server_pid(await stack.status(), SIMPLE, server), signal.SIGKILL)
    return await asyncio.wait_for(running, 5)


async def test_a_dead_server_fails_its_rollouts_and_comes_back() -> None:
    """Agent or resources server; the other environment's rollout goes on."""
    async with acquire(stack_config(SIMPLE, SESSIONS)) as stack:
        other = Gate(stack)
        going_on = asyncio.create_task(stack.run(SESSION_ROW, policy=other.endpoint, environment=SESSIONS))
        await other.asked.wait()
        before = await stack.status()
        for generation, server in enumerate((SIMPLE, AGENT), start=2):
            rollout = await killed_while_in_flight(stack, server)
            assert rollout.status == "failed"
            assert rollout.reward is None
            assert rollout.error is not None
            assert (rollout.error.kind, rollout.error.type) == ("infrastructure", "ServerDiedError")
            assert rollout.error.server == server
            assert "SIGKILL" in rollout.error.message
            again = await stack.run(ROW, policy=scripted(stack), environment=SIMPLE)
            assert again.reward == 1.0
            after = (await stack.status())["environments"]
            assert after[SIMPLE]["generation"] == generation
            ports = {name: found["port"] for name, found in after[SIMPLE]["servers"].items()}
            assert ports == {
                name: found["port"] for name, found in before["environments"][SIMPLE]["servers"].items()
            }
        assert after[SESSIONS]["servers"] == before["environments"][SESSIONS]["servers"]
        other.opened.set()
        assert (await going_on).error is None


async def test_too_many_deaths_take_the_environment_down(caplog: pytest.LogCaptureFixture) -> None:
    """The first restart comes at once, the next one after a wait; the user is told of each."""
    async with acquire(stack_config(SIMPLE, max_restarts=2)) as stack:
        for _ in range(2):
            await killed_while_in_flight(stack, SIMPLE)
            assert (await stack.run(ROW, policy=scripted(stack))).reward == 1.0
        await killed_while_in_flight(stack, SIMPLE)
        rollout = await stack.run(ROW, policy=scripted(stack))
        assert rollout.error is not None
        assert rollout.error.type == ServerDiedError.__name__
        assert "down after 2 restarts within 600 s" in rollout.error.message
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    first, second, down = [line for line in told if SIMPLE in line]
    assert "SIGKILL" in first
    assert "(1 of 2 within 600 s)" in first
    assert " 0.5 s (2 of 2 within 600 s)" in second
    assert " 2 restarts within 600 s" in down


async def test_deaths_that_lie_far_apart_are_none_too_many() -> None:
    """As many as there may be in one window, and one more in each window after it."""
    async with acquire(stack_config(SIMPLE, max_restarts=1, restart_window_s=1.0)) as stack:
        for deaths in range(1, 4):
            await killed_while_in_flight(stack, SIMPLE)
            assert (await stack.run(ROW, policy=scripted(stack))).reward == 1.0
            while (place := (await stack.status())["environments"][SIMPLE])["recent_restarts"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert (place["restarts"], place["state"]) == (deaths, "up")


async def test_a_server_that_cannot_restart_takes_the_environment_down(tmp_path: Path) -> None:
    environment = faulty(tmp_path, fault="once", tool="exit")
    async with acquire(stack_config(environment, max_restarts=2)) as stack:
        first = await stack.run(ROW, policy=scripted(stack))
        assert first.error is not None
        assert "exit status 3" in first.error.message
        second = await stack.run(ROW, policy=scripted(stack))
        assert second.error is not None
        assert "only once" in second.error.message


async def test_a_dead_fork_server_is_replaced() -> None:
    """With it die the servers; rollouts in flight fail, later ones find new ones."""
    async with acquire(stack_config(SIMPLE)) as stack:
        gate = Gate(stack)
        running = asyncio.create_task(stack.run(ROW, policy=gate.endpoint))
        await gate.asked.wait()
        before = await stack.status()
        os.kill(before["fork_servers"][0], signal.SIGKILL)
        rollout = await asyncio.wait_for(running, 5)
        assert rollout.error is not None
        assert rollout.error.kind == "infrastructure"
        assert await all_gone(set(pids_of(before)) - {before["pid"]})
        assert (await stack.run(ROW, policy=scripted(stack))).reward == 1.0


async def test_a_dead_daemon_leaves_nothing_and_is_noticed() -> None:
    async with acquire(stack_config(SIMPLE)) as stack:
        gate = Gate(stack)
        running = asyncio.create_task(stack.run(ROW, policy=gate.endpoint))
        await gate.asked.wait()
        status = await stack.status()
        os.kill(status["pid"], signal.SIGKILL)
        with pytest.raises(StackLostError, match="daemon is gone"):
            await asyncio.wait_for(running, 5)
        assert await all_gone(pids_of(status))
        async with acquire(stack_config(SIMPLE)) as other:
            assert (await other.run(ROW, policy=scripted(other))).reward == 1.0


async def test_helpers_of_servers_end_with_them(tmp_path: Path) -> None:
    """A process that a tool started in a session of its own: when its server dies, and when the stack stops."""
    async with acquire(stack_config(faulty(tmp_path, tool="helper"))) as stack:
        first, second = [await helper_of(stack), await helper_of(stack)]
        status = await stack.status()
        name = name_of(stack, stack.config.environments[0].name)
        os.kill(server_pid(status, name, "faulty"), signal.SIGKILL)
        assert await all_gone([first, second])
        while (await stack.status())["environments"][name]["generation"] == 1:  # noqa: ASYNC110 - the daemon's state
            await asyncio.sleep(0.02)
        third = await helper_of(stack)
        assert not await all_gone([third], 0)
    assert await all_gone([third, *pids_of(status)])


async def helper_of(stack: Stack) -> int:
    rollout = await stack.run(ROW, policy=scripted(stack))
    assert rollout.result is not None, rollout.error
    output = next(
        item for item in rollout.result["response"]["output"] if item["type"] == "function_call_output"
    )
    return int(output["output"].split(":")[1].strip(" }"))


SDK = """
import asyncio, sys
from support.stacks import *
from gymgate.stack import acquire

async def main():
    async with acquire(stack_config(SIMPLE)) as stack:
        print(*pids_of(await stack.status()), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_sdk_process_leaves_nothing() -> None:
    process = await start_sdk(SDK)
    assert process.stdout is not None
    pids = [int(pid) for pid in (await process.stdout.readline()).split()]
    process.kill()
    await process.wait()
    assert len(pids) == 4
    assert await all_gone(pids)


@pytest.mark.heavy  # of a command, in test_run_cli.py; at some instants, in test_faults_signals.py
@pytest.mark.parametrize("signals", [1, 2])
async def test_ctrl_c_leaves_nothing(signals: int) -> None:
    """Once, or once more while everything stops."""
    process = await start_sdk(SDK)
    assert process.stdout is not None
    pids = [int(pid) for pid in (await process.stdout.readline()).split()]
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.1)
    assert await asyncio.wait_for(process.wait(), 8) != 0
    assert len(pids) == 4
    assert await all_gone(pids)


started: list[asyncio.subprocess.Process] = []


@pytest.fixture(autouse=True)
async def no_program_outlives_its_test() -> AsyncIterator[None]:
    """Not even that of a test that failed; its stack ends with it."""
    yield
    while started:
        process = started.pop()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def start_sdk(code: str) -> asyncio.subprocess.Process:
    here = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    started.append(process)
    return process


@pytest.mark.parametrize(
    ("fault", "timeout_s", "words"),
    [
        ("die", 60.0, "'faulty'.*no such luck"),
        ("exit", 60.0, "'faulty'.*no such luck"),
        ("hang", 10.0, "after 10 s.*'faulty'"),
    ],
    ids=["dies", "exits", "hangs"],
)
async def test_a_start_that_fails_says_which_server(
    tmp_path: Path, fault: str, timeout_s: float, words: str
) -> None:
    """Everyone who waits gets the same, and nothing is left."""
    config = stack_config(faulty(tmp_path, fault=fault), start_timeout_s=timeout_s)

    async def start() -> None:
        async with acquire(config):
            pass

    errors = await asyncio.gather(start(), start(), return_exceptions=True)
    for error in errors:
        assert isinstance(error, StackStartError)
        assert error.server == "faulty"
        with pytest.raises(StackStartError, match=words):
            raise error
    assert not daemons_of(os.getpid())


def daemons_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"gymgate.stack.daemon" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
