"""One stack for the whole machine: many processes on it, any of them killed, the last one out stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gymgate.stack import acquire
from support.ledger import Program, all_gone, daemon_of, program, until
from support.stacks import SIMPLE, alive, server_pid, stack_config

pytestmark = pytest.mark.gym

WORKER = """
config = stack_config(share="machine", state_dir=sys.argv[1], linger_s=float(sys.argv[2]))

async def main():
    started = time.monotonic()
    async with acquire(config) as stack:
        say(f"{time.monotonic() - started:.3f}", *pids_of(await stack.status()))
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        done = 0
        while len(sys.argv) > 3 or not done:
            rollout = await stack.run(ROW, policy=policy)
            done += 1
            if rollout.reward != 1.0:
                say("failed", rollout.error and rollout.error.kind)
                break
            if done % 20 == 0:
                say("rollouts", done)
        say("done")
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


def memory_mb(pids: list[int]) -> float:
    """Proportional share of these processes, MB."""
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            found += int(next(line.split()[1] for line in text.splitlines() if line.startswith("Pss:")))
    return found / 1024


async def leave(worker: Program) -> None:
    """Let a worker go in its own time."""
    assert worker.process.stdin is not None
    worker.process.stdin.write(b"\n")
    assert await worker.ended(10) == 0


@pytest.mark.parametrize("count", [4, pytest.param(8, marks=pytest.mark.heavy)])
async def test_workers_on_one_stack(tmp_path: Path, count: int) -> None:
    """Started at once, killed at random while they run: the rest goes on, and the memory is that of one stack."""
    chance = random.Random(8)
    async with AsyncExitStack() as exits:
        workers = [await exits.enter_async_context(program(WORKER, tmp_path, 0, "on")) for _ in range(count)]
        found = [(await worker.line()).split()[1:] for worker in workers]
        assert len(found[0]) == 4
        assert all(pids == found[0] for pids in found), found
        pids = [int(pid) for pid in found[0]]
        assert memory_mb(pids) < 500
        for worker in workers:
            await worker.until_line("rollouts")
        chance.shuffle(workers)
        *leaving, last = workers
        for worker in leaving:
            worker.signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
            await worker.ended(5)
            for other in workers[workers.index(worker) + 1 :]:
                assert (await other.line()).startswith("rollouts")
        assert alive(pids) == pids
        last.signal(signal.SIGKILL)
        await last.ended(5)
        assert await all_gone(pids)


async def a_server_dies(state_dir: Path) -> None:
    """It fails rollouts of every worker, and stops none."""
    config = stack_config(share="machine", state_dir=str(state_dir), linger_s=60)
    async with program(WORKER, state_dir, 60, "on") as one, program(WORKER, state_dir, 60, "on") as two:
        for worker in (one, two):
            await worker.until_line("rollouts")
        async with acquire(config) as stack:
            assert (await stack.status())["leases"] == 3
            os.kill(server_pid(await stack.status(), SIMPLE, SIMPLE), signal.SIGKILL)
        for worker in (one, two):
            line = await worker.until_line("failed")
            assert "infrastructure" in line
            await worker.until_line("done")
            await leave(worker)


async def test_the_next_start_on_a_lingering_stack_is_instant(tmp_path: Path) -> None:
    """The one that started it ends without waiting for it; of several that use it next, none is stopped by a server's death."""
    async with program(WORKER, tmp_path, 60) as first:
        cold_s, *pids = [float(word) for word in (await first.line()).split()]
        await first.until_line("done")
        started = time.monotonic()
        await leave(first)
        assert time.monotonic() - started < 3
    stack = [int(pid) for pid in pids]
    assert alive(stack) == stack
    async with program(WORKER, tmp_path, 60) as second:
        warm_s, *again = [float(word) for word in (await second.line()).split()]
        assert again == pids
        await second.until_line("done")
        await leave(second)
    assert warm_s < min(1.0, cold_s / 2)
    await a_server_dies(tmp_path)
    os.kill(stack[0], signal.SIGTERM)  # or in a minute
    assert await all_gone(stack)


@contextlib.asynccontextmanager
async def started(*arguments: object) -> AsyncIterator[tuple[Program, list[int]]]:
    async with program(WORKER, *arguments) as worker:
        yield worker, [int(float(word)) for word in (await worker.line()).split()[1:]]


async def test_joining_while_the_last_one_leaves(tmp_path: Path) -> None:
    """Whoever comes then gets a stack that stays: the old one or another, never an error."""
    config = stack_config(share="machine", state_dir=str(tmp_path / secrets.token_hex(2)))
    seen = set()

    async def visit(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        async with acquire(config) as stack:
            seen.add((await stack.status())["pid"])
            await asyncio.sleep(0.05)
            assert (await stack.status())["pid"] in seen

    async with started(config.state_dir, 0) as (worker, _):
        await worker.until_line("done")
        leaving = asyncio.create_task(leave(worker))
        await asyncio.gather(leaving, *(visit(0.01 * step) for step in range(24)))
    await until(lambda: daemon_of(os.getpid()) is None, 6)
