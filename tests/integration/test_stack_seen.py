"""A real stack seen and stopped from outside: `gymgate ps`, `logs` and `stop`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.errors import StackLostError
from gymgate.stack import Stack, acquire, connect
from support.json_output import read_output
from support.stacks import ROW, SIMPLE, all_gone, call_then_answer, pids_of, server_pid, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm]

AGENT = f"{SIMPLE}_simple_agent"


async def gymgate(*words: str) -> tuple[int | None, str]:
    """A command of another process: its exit code and what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gymgate", *words, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    return process.returncode, out.decode()


async def seen(pid: int) -> dict[str, Any]:
    _, out = await gymgate("ps", "--json")
    [stack] = [stack for stack in read_output("ps", out)["stacks"] if stack["pid"] == pid]
    return stack  # type: ignore[no-any-return]


class Gate:
    """A rollout whose policy has been asked and does not answer."""

    def __init__(self, stack: Stack) -> None:
        self.asked = asyncio.Event()
        endpoint = stack.register("gate", self.answer, dialect="responses")
        self.rollout = asyncio.create_task(stack.run(ROW, policy=endpoint))

    async def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.set()
        await asyncio.Event().wait()
        return {}


async def test_a_stack_is_seen_read_and_stopped() -> None:
    """With a rollout under way, which loses its stack; nothing is left of that."""
    async with acquire(stack_config()) as stack:
        scripted = stack.register("scripted", call_then_answer, dialect="responses")
        assert (await stack.run(ROW, policy=scripted)).reward == 1.0
        status = await stack.status()
        pid = status["pid"]
        gate = Gate(stack)
        await gate.asked.wait()
        found = await seen(pid)
        assert (found["state"], found["rollouts"], found["leases"]) == ("ready", 1, 1)
        assert found["environments"] == [{"name": SIMPLE, "state": "up"}]
        assert (found["share"], found["owner"], found["processes"]) == ("process", os.getpid(), [os.getpid()])
        assert found["memory"] > 10_000_000
        assert found["directory"] == status["directory"]

        code, out = await gymgate("logs", str(pid), AGENT)
        assert code == 0
        assert "Uvicorn running on" in out
        code, out = await gymgate("logs", str(pid), "-n", "3")
        names = {line.partition(" | ")[0] for line in out.splitlines()}
        assert {"daemon", SIMPLE, AGENT} <= names

        assert await gymgate("stop", str(pid)) == (0, f"stopped {pid} ({SIMPLE})\n")
        with pytest.raises(StackLostError, match="gymgate stop"):
            await gate.rollout
        assert await all_gone(pids_of(status))
        assert found["directory"] not in map(str, Path(found["directory"]).parent.iterdir())
    code, out = await gymgate("stop", str(pid))
    assert (code, out) == (1, "")


async def test_a_program_that_goes_on_starts_its_stack_again() -> None:
    stack = await connect(stack_config(), reconnect=True)
    try:
        scripted = stack.register("scripted", call_then_answer, dialect="responses")
        before = await stack.status()
        code, _ = await gymgate("stop", str(before["pid"]))
        assert code == 0
        assert await all_gone(pids_of(before))
        assert (await stack.run(ROW, policy=scripted)).reward == 1.0
        assert (await seen((await stack.status())["pid"]))["state"] == "ready"
    finally:
        await stack.close()


@pytest.mark.warm(False)  # its fork server is to be below the daemon
async def test_a_stack_that_hangs_is_killed_with_everything_below_it() -> None:
    async with acquire(stack_config()) as stack:
        status = await stack.status()
        gate = Gate(stack)
        await gate.asked.wait()
        for pid in (server_pid(status, SIMPLE, AGENT), status["fork_servers"][0], status["pid"]):
            os.kill(pid, signal.SIGSTOP)
        assert (await seen(status["pid"]))["state"] == "not answering"
        code, out = await gymgate("stop", "--now", str(status["pid"]))
        assert (code, out) == (0, f"killed {status['pid']} ({SIMPLE})\n")
        with pytest.raises(StackLostError):
            await gate.rollout
        assert await all_gone(pids_of(status))


async def test_a_shared_stack_that_lingers_is_seen_and_stopped() -> None:
    """To look at it does not end it before its time."""
    config = stack_config(share="machine", linger_s=600, max_restarts=os.getpid() % 1000 + 10)
    async with acquire(config) as stack:
        status = await stack.status()
    found = await seen(status["pid"])
    assert (found["state"], found["leases"], found["share"], found["owner"]) == ("ready", 0, "machine", None)
    assert (await seen(status["pid"]))["state"] == "ready"
    code, _ = await gymgate("stop", str(status["pid"]))
    assert code == 0
    assert await all_gone(pids_of(status))
