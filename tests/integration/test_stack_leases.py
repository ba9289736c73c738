"""Who shares a real stack, and when it ends: event loops, threads, forks, processes, cancelled starts."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.errors import StackLostError
from gymgate.stack import Stack, SyncStack, acquire, acquire_sync, connect
from gymgate.stack.client.leases import current_leases
from support.stacks import ROW, SIMPLE, alive, all_gone, call_then_answer, pids_of, stack_config

pytestmark = pytest.mark.gym


async def score(stack: Stack) -> float | None:
    policy = stack.register("scripted", call_then_answer, dialect="responses")
    return (await stack.run(ROW, policy=policy, environment=SIMPLE)).reward


def in_new_loop(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def test_loops_and_threads_share_one_stack() -> None:
    """Two loops in threads, this one, and plain threads: one daemon, which counts each lease."""

    async def other_loop() -> tuple[int, float | None]:
        async with acquire(stack_config()) as stack:
            return (await stack.status())["pid"], await score(stack)

    def plain_thread() -> tuple[int, float | None]:
        with acquire_sync(stack_config()) as stack:
            return stack.call(stack.stack.status())["pid"], sync_score(stack)

    said: list[str] = []
    async with acquire(stack_config(), progress=said.append) as stack, acquire(stack_config()) as again:
        pid = (await stack.status())["pid"]
        assert (await again.status())["leases"] == 2
        with ThreadPoolExecutor(4) as pool:
            loop = asyncio.get_running_loop()
            jobs = [loop.run_in_executor(pool, in_new_loop, other_loop()) for _ in range(2)]
            jobs += [loop.run_in_executor(pool, plain_thread) for _ in range(2)]
            assert await asyncio.gather(*jobs) == [(pid, 1.0)] * 4
        assert await score(stack) == 1.0
        pids = pids_of(await stack.status())
    assert not alive(pids)
    assert any("importing" in line for line in said)
    assert any(SIMPLE in line for line in said)


def sync_score(stack: SyncStack) -> float | None:
    def policy(body: dict[str, Any]) -> dict[str, Any]:
        asked = any(message["role"] == "tool" for message in body["messages"])
        function = {"name": "get_weather", "arguments": '{"city": "sf"}'}
        call = {"id": "call_1", "type": "function", "function": function}
        message = (
            {"role": "assistant", "content": "cold"} if asked else {"role": "assistant", "tool_calls": [call]}
        )
        choice = {"index": 0, "message": message, "finish_reason": "stop" if asked else "tool_calls"}
        return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

    return stack.run(ROW, policy=policy).reward


async def test_a_stack_ends_with_its_last_lease_and_starts_again() -> None:
    first = await connect(stack_config())
    second = await connect(stack_config())
    pids = pids_of(await first.status())
    await first.close()
    await first.close()
    assert alive(pids)
    with pytest.raises(StackLostError, match="closed"):
        await first.status()
    assert await score(second) == 1.0
    await second.close()
    assert not alive(pids)
    async with acquire(stack_config()) as third:
        assert (await third.status())["pid"] not in pids


async def test_a_stack_lingers_if_asked() -> None:
    config = stack_config(linger_s=1.0)
    async with acquire(config) as stack:
        pids = pids_of(await stack.status())
    assert alive(pids) == pids
    async with acquire(config) as stack:
        assert pids_of(await stack.status()) == pids
    assert await all_gone(pids, 6.0)


async def test_a_cancelled_start_leaves_nothing_and_spares_others() -> None:
    said: list[str] = []
    importing = asyncio.Event()

    def progress(line: str) -> None:
        said.append(line)
        importing.set()

    task = asyncio.create_task(connect(stack_config(), progress=progress))
    await importing.wait()
    patient = asyncio.create_task(connect(stack_config()))
    while len(current_leases()._taken) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stack = await patient
    assert await score(stack) == 1.0
    await stack.close()
    importing.clear()
    task = asyncio.create_task(connect(stack_config(), progress=progress))
    await importing.wait()
    (daemon,) = daemons()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive([daemon])


def daemons() -> list[int]:
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if b"gymgate.stack.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()]


FORKED = """
import asyncio, os, sys
from support.stacks import *
from gymgate.core.errors import StackLostError
from gymgate.stack import acquire, connect

async def score(stack):
    policy = stack.register("scripted", call_then_answer, dialect="responses")
    return (await stack.run(ROW, policy=policy)).reward

async def child(inherited):
    try:
        await inherited.status()
    except StackLostError as error:
        assert "acquire it again" in str(error), error
    async with acquire(stack_config()) as own:
        assert (await own.status())["pid"] != parent_daemon
        assert await score(own) == 1.0

async def start():
    stack = await connect(stack_config())
    return stack, (await stack.status())["pid"]

loop = asyncio.new_event_loop()
stack, parent_daemon = loop.run_until_complete(start())
pid = os.fork()
if pid == 0:
    asyncio.run(child(stack))
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert loop.run_until_complete(score(stack)) == 1.0
pid = os.fork()
if pid == 0:
    import time
    os.close(1)
    time.sleep(60)   # a worker that outlives its parent and never knew of the stack
    os._exit(0)
print(pid, *pids_of(loop.run_until_complete(stack.status())), flush=True)
os.kill(os.getpid(), 9)
"""


async def test_forked_children_have_their_own_stack_and_hold_no_lease() -> None:
    worker, *pids = await printed(FORKED)
    try:
        assert alive([worker])
        assert await all_gone(pids)
    finally:
        os.kill(worker, 9)


SHARED = """
import asyncio, sys
from support.stacks import *
from gymgate.stack import acquire

async def main():
    async with acquire(stack_config(share="machine", max_restarts=int(sys.argv[1]))) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        assert (await stack.run(ROW, policy=policy)).reward == 1.0
        print(*pids_of(await stack.status()), flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


async def test_processes_share_a_stack_of_the_machine() -> None:
    """Started at the same time; the one that started the daemon may go first."""
    token = str(os.getpid() % 1000 + 10)  # a config that nobody else on this machine has
    processes = [await start(SHARED, token) for _ in range(3)]
    found = [[int(pid) for pid in (await out(process).readline()).split()] for process in processes]
    assert found[0] == found[1] == found[2]
    for process in processes[:2]:
        process.kill()
        await process.wait()
    assert alive(found[0]) == found[0]
    await processes[2].communicate(b"\n")
    assert processes[2].returncode == 0
    assert await all_gone(found[0])


async def test_leases_left_open_end_with_the_interpreter() -> None:
    code = """
import asyncio, threading
from support.stacks import *
from gymgate.stack import connect

async def main():
    stack = await connect(stack_config())
    print(*pids_of(await stack.status()), flush=True)

asyncio.run(main())
"""
    pids = await printed(code)
    assert not alive(pids)


async def printed(code: str) -> list[int]:
    """Numbers that a process printed on its last line, after it ended."""
    process = await start(code)
    text = await out(process).readline()
    await process.wait()
    return [int(word) for word in text.split()]


async def start(code: str, *arguments: str) -> asyncio.subprocess.Process:
    here = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-c", code, *arguments]
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)


def out(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert process.stdout is not None
    return process.stdout


@pytest.mark.heavy  # with loops beside them, in test_faults_cancel.py
def test_plain_threads_share_a_stack() -> None:
    """Its loop ends with it."""
    results: list[float | None] = []
    with acquire_sync(stack_config()) as stack:
        threads = [threading.Thread(target=lambda: results.append(sync_score(stack))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [1.0] * 8
    assert "gymgate-stack" not in [thread.name for thread in threading.enumerate()]
