"""The stacks of a process that runs an eval: one per event loop and config, and one that starts early.

Verifiers' env holds its stack from start to stop. Whoever runs without that env (`--env.id best-of-n`, Inspect) takes one on
its first rollout and keeps it until its loop ends. Nothing here is shared between loops, so there is no lock.

`gymgate eval run` starts the stack while verifiers is imported, so that the eval finds it up, or nearly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from gymgate.core.config import StackConfig
from gymgate.core.starting import SharedStart
from gymgate.gym.runtime.command import Progress
from gymgate.stack import Stack, acquire, connect
from gymgate.stack.sync import LoopThread


@dataclass
class _SharedStack:
    """A stack, starting or up. It starts again after it was lost."""

    start: SharedStart[Stack]
    users: int = 0
    """Envs that hold it; one that no env holds is kept until its loop ends."""
    until_loop_ends: AsyncGenerator[None, None] | None = None


_stacks: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[StackConfig, _SharedStack]] = WeakKeyDictionary()


async def stack_for(config: StackConfig, progress: Progress) -> Stack:
    """Return this loop's stack for `config`, started if it is not up; `progress` gets a line per step of the start.

    All who wait for a start that fails get its error; the next call tries again. Cancelling a waiter does not cancel
    the start.
    """
    shared = _of_this_loop(config, progress)
    stack = await shared.start.get()
    if not shared.users and shared.until_loop_ends is None:
        shared.until_loop_ends = _close_when_loop_ends(stack)
        await anext(shared.until_loop_ends)
    return stack


async def hold(config: StackConfig, progress: Progress) -> None:
    """Start this loop's stack for `config` and keep it until as many `release` calls."""
    shared = _of_this_loop(config, progress)
    shared.users += 1
    await shared.start.get()


async def release(config: StackConfig) -> None:
    """Undo one `hold`, whether it succeeded or not; the last one gives the lease back."""
    stacks = _stacks.get(asyncio.get_running_loop(), {})
    if (shared := stacks.get(config)) is None:
        return
    shared.users -= 1
    if shared.users <= 0 and shared.until_loop_ends is None:
        del stacks[config]
        if (stack := await shared.start.stop()) is not None:
            await stack.close()


def _of_this_loop(config: StackConfig, progress: Progress) -> _SharedStack:
    stacks = _stacks.setdefault(asyncio.get_running_loop(), {})
    if config not in stacks:
        stacks[config] = _SharedStack(SharedStart(lambda: connect(config, progress=progress, reconnect=True)))
    return stacks[config]


async def _close_when_loop_ends(stack: Stack) -> AsyncGenerator[None, None]:
    """Close the stack with `shutdown_asyncgens`, with which every event loop's runner ends."""
    try:
        yield
    finally:
        await stack.close()


@contextlib.contextmanager
def starting_early(config: StackConfig, progress: Progress) -> Iterator[None]:
    """Start a stack in the background, on an event loop in a thread, and hold a lease on it until the block ends.

    Whoever acquires the same config inside joins the stack. A start that fails is not reported here: the eval, which needs
    the stack, tries again and reports it.
    """
    with LoopThread() as loop:  # whose end waits until the lease is given back
        lease = loop.submit(_hold(config, progress))
        try:
            yield
        finally:
            lease.cancel()


async def _hold(config: StackConfig, progress: Progress) -> None:
    async with acquire(config, progress=progress):
        await asyncio.Event().wait()
