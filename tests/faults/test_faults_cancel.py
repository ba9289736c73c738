"""Work that is given up at every moment: cancelled at each step, loops closed, processes forked, things pickled."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gymgate.core.config import StackConfig
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire, acquire_sync, connect
from support.ledger import all_gone, daemon_of, held, idle, program, until
from support.pickles import crosses
from support.stacks import ROW, call_then_answer, pids_of, stack_config

MANY = 400
"""More steps than anything here takes."""


@types.coroutine
def interrupted(work: Coroutine[Any, Any, Any], step: int) -> Generator[Any, Any, bool]:
    """Run a coroutine in the current task and cancel that in the coroutine's `step`-th wait; true if it got so far."""
    task = asyncio.current_task()
    assert task is not None
    taken, thrown, reached = 0, None, False
    while True:
        try:
            waits_for = work.send(None) if thrown is None else work.throw(thrown)
        except StopIteration:
            return reached
        taken += 1
        if taken == step:
            reached = True
            asyncio.get_running_loop().call_soon(task.cancel)
        thrown = None
        try:
            yield waits_for
        except BaseException as error:
            thrown = error


async def cancelled_at_every_step(work: Callable[[], Coroutine[Any, Any, Any]], limit: int = MANY) -> int:
    """Cancel the work in its first wait, then in its second, until it has no more; how many there were."""
    for step in range(1, limit):
        task = asyncio.create_task(_until(interrupted(work(), step)))
        await asyncio.wait([task], timeout=60)  # a start on a busy machine included
        assert task.done(), f"step {step} hangs"
        if not task.cancelled():
            assert not task.result(), f"cancelled in step {step}, it went on"
            return step - 1
    return limit


async def _until(work: Any) -> bool:
    return bool(await work)


@pytest.fixture(scope="module")
def shared() -> Iterator[StackConfig]:
    """The config of a stack that stays up beside these tests, by one lease."""
    with held(stack_config()):
        yield stack_config()


@pytest.mark.gym
async def test_cancelled_at_every_wait_of_the_sdk(shared: StackConfig) -> None:
    """Acquiring, running, asking and giving back, beside leases that stay."""
    async with acquire(shared) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")

        async def everything() -> None:
            async with acquire(shared) as own:
                await own.run(ROW, policy=policy)

        steps = await cancelled_at_every_step(everything)
        assert steps >= 3
        await idle(stack)
        assert (await stack.run(ROW, policy=policy)).reward == 1.0
        assert (await stack.status())["leases"] == 2

        async def alone_in_a_loop() -> None:
            async with acquire(shared) as own:
                await own.run(ROW, policy=lambda body: {})

        def in_its_own_loop() -> int:
            return asyncio.run(cancelled_at_every_step(alone_in_a_loop))

        assert await asyncio.to_thread(in_its_own_loop) >= 2
        await idle(stack)
        assert (await stack.status())["leases"] == 2


@pytest.mark.gym
@pytest.mark.heavy
async def test_cancelled_at_every_wait_of_a_start() -> None:
    """Of a stack that nobody else has: its daemon goes with whoever wanted it."""

    async def alone() -> None:
        async with acquire(stack_config()):
            pass

    assert await cancelled_at_every_step(alone) >= 2
    await until(lambda: daemon_of(os.getpid()) is None, 6)


@pytest.mark.gym
async def test_cancelled_at_every_moment_of_a_rollout(shared: StackConfig) -> None:
    """What the daemon and the servers do is cancelled too: no route stays, and the next rollout is not disturbed."""
    async with acquire(shared) as stack:
        calls = 0

        async def slow(body: dict[str, Any]) -> dict[str, Any]:
            nonlocal calls
            calls += 1
            await asyncio.sleep(0.01)
            return call_then_answer(body)

        policy = stack.register("slow", slow, dialect="responses")
        loop = asyncio.get_running_loop()
        started = loop.time()
        assert (await stack.run(ROW, policy=policy)).reward == 1.0
        whole_s = loop.time() - started
        tasks = []
        for moment in range(60):
            task = asyncio.create_task(stack.run(ROW, policy=policy))
            loop.call_later(whole_s * moment / 50, task.cancel)
            tasks.append(task)
            await asyncio.sleep(0.005)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ended:
            if isinstance(end, Rollout):
                assert end.reward == 1.0, end.error
            else:
                assert isinstance(end, asyncio.CancelledError), end
        await idle(stack)
        before = calls
        assert (await stack.run(ROW, policy=policy)).reward == 1.0
        assert calls == before + 2


@pytest.mark.gym
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # as for whatever a closed loop leaves open
def test_a_loop_closed_under_a_stack() -> None:
    """Its lease goes with it, as soon as anybody asks; the next loop is not disturbed."""
    loop = asyncio.new_event_loop()
    stack = loop.run_until_complete(connect(stack_config(linger_s=30, max_restarts=2)))
    pid = loop.run_until_complete(stack.status())["pid"]
    running = loop.create_task(stack.run(ROW, policy=lambda body: {}))
    loop.run_until_complete(asyncio.sleep(0.02))
    running.add_done_callback(lambda task: task.cancelled())
    loop.close()
    running._log_destroy_pending = False  # type: ignore[attr-defined]

    async def again() -> list[int]:
        async with acquire(stack_config(linger_s=30, max_restarts=2)) as other:
            policy = other.register("scripted", call_then_answer, dialect="responses")
            assert (await other.run(ROW, policy=policy)).reward == 1.0
            while (status := await other.status())["leases"] != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert status["pid"] == pid
            await idle(other)
            return pids_of(status)

    pids = asyncio.run(asyncio.wait_for(again(), 30))
    os.kill(pid, 15)
    assert asyncio.run(all_gone(pids))


@pytest.mark.gym
def test_two_loops_and_four_threads_on_one_stack(shared: StackConfig) -> None:
    """All at once, each with its own policy; every rollout gets its own answers."""

    def marked(mark: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def policy(body: dict[str, Any]) -> dict[str, Any]:
            message = {"role": "assistant", "content": mark}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}

        return policy

    def check(rollout: Rollout, mark: str) -> None:
        assert rollout.error is None, rollout.error
        assert mark in str(rollout.result)
        assert len(rollout.calls) == 1

    async def on_a_loop(number: int) -> int:
        async with acquire(shared) as stack:
            marks = [f"loop-{number}-{index}." for index in range(16)]
            found = await asyncio.gather(*(stack.run(ROW, policy=marked(mark)) for mark in marks))
            for rollout, mark in zip(found, marks, strict=True):
                check(rollout, mark)
            return int((await stack.status())["pid"])

    def in_a_thread(number: int) -> int:
        with acquire_sync(shared) as stack:
            for index in range(8):
                mark = f"thread-{number}-{index}."
                check(stack.run(ROW, policy=marked(mark)), mark)
            return int(stack.call(stack.stack.status())["pid"])

    with acquire_sync(shared) as stack, ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(asyncio.run, on_a_loop(number)) for number in range(2)]
        jobs += [pool.submit(in_a_thread, number) for number in range(4)]
        assert {job.result(60) for job in jobs} == {stack.call(stack.stack.status())["pid"]}
    assert "gymgate-stack" not in [thread.name for thread in threading.enumerate()]


WORKERS = """
import multiprocessing

def work(number):
    return number * number

async def main():
    async with acquire(stack_config()) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        running = [asyncio.create_task(stack.run(ROW, policy=policy)) for _ in range(8)]
        await asyncio.sleep(0)
        with multiprocessing.get_context("fork").Pool(4) as workers:   # as data loaders do
            assert workers.map(work, range(40)) == [number * number for number in range(40)]
            rollouts = await asyncio.gather(*running)
            assert [rollout.reward for rollout in rollouts] == [1.0] * 8
            workers.terminate()
        assert (await stack.run(ROW, policy=policy)).reward == 1.0
        status = await stack.status()
        assert status["leases"] == 1
        keep = os.fork()     # a worker that lives on, and did not say so
        if keep == 0:
            os.close(1)
            time.sleep(60)
            os._exit(0)
        pids = pids_of(status)
    say(keep, *pids)

asyncio.run(main())
"""


@pytest.mark.gym
async def test_data_loaders_workers_forked_beside_rollouts() -> None:
    """They neither disturb the rollouts nor hold the stack."""
    async with program(WORKERS, quiet=False) as sdk:
        worker, *pids = await sdk.numbers()
        try:
            assert await sdk.ended(10) == 0
            assert len(pids) == 4
            assert await all_gone(pids)
        finally:
            os.kill(worker, 9)


def test_what_crosses_processes_pickles() -> None:
    """As multiprocessing does it; Ray: tests/training."""
    crosses(pickle.dumps)


@pytest.mark.gym
async def test_a_rollout_pickles_and_a_stack_says_what_to_send_instead(shared: StackConfig) -> None:
    async with acquire(shared) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        rollout = await stack.run(ROW, policy=policy)
        assert pickle.loads(pickle.dumps(rollout)) == rollout
        with pytest.raises(TypeError, match="config"):
            pickle.dumps(stack)
        assert isinstance(stack, Stack)

    def plain() -> None:
        with acquire_sync(shared) as sync, pytest.raises(TypeError, match="config"):
            pickle.dumps(sync)

    await asyncio.to_thread(plain)
