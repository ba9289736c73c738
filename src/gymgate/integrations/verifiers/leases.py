"""The stacks that this process's event loops hold: one per loop and config, shared by every rollout on it.

The env holds its stack from start to stop. A harness that runs without our env (`--env.id best-of-n`) starts
one on its first rollout and keeps it until its loop ends. Nothing here is shared between loops, so there is no
lock; between threads and processes the stack's daemon does the sharing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from gymgate.config import StackConfig
from gymgate.stack import Stack, acquire

logger = logging.getLogger("verifiers.v1.gymgate")
"""Below verifiers' own logger: the only place from which records reach the console and eval.log."""

Progress = Callable[[str], None]


@dataclass
class _Held:
    """A stack, starting or up. The generator ends with its loop (`shutdown_asyncgens`) if nothing else ends it."""

    holder: AsyncGenerator[Stack, None]
    starting: asyncio.Task[Stack]
    users: int = 0
    """Envs that hold it; without any it is kept until the loop ends."""

    async def close(self) -> None:
        self.starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.starting
        await self.holder.aclose()


_held: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Held]] = WeakKeyDictionary()


async def stack_for(config: StackConfig) -> Stack:
    """This loop's stack for `config`, started if it is not up.

    Everyone who waits for a start that fails gets its error; the next call tries again. Cancelling a waiter
    leaves the start to the others.
    """
    return await _ready(_entry(config, say), config)


async def hold(config: StackConfig) -> Stack:
    """As `stack_for`, and keep it until as many `release` calls."""
    entry = _entry(config, say)
    entry.users += 1
    return await _ready(entry, config)


async def release(config: StackConfig) -> None:
    """Undo one `hold`, whether it succeeded or not; the last one closes the stack. Unknown: nothing to do."""
    stacks = _held.get(asyncio.get_running_loop(), {})
    entry = stacks.get(config.digest())
    if entry is None:
        return
    entry.users -= 1
    if entry.users <= 0:
        del stacks[config.digest()]
        await entry.close()


async def forget(config: StackConfig, stack: Stack) -> None:
    """Drop a stack that was lost, so that the next rollout starts another."""
    stacks = _held.get(asyncio.get_running_loop(), {})
    entry = stacks.get(config.digest())
    if entry is None or not entry.starting.done() or entry.starting.result() is not stack:
        return
    replacement = _start(config, say)
    replacement.users = entry.users
    stacks[config.digest()] = replacement
    with contextlib.suppress(Exception):
        await entry.close()


def say(message: str) -> None:
    """Log a progress line; on the terminal too where verifiers' dashboard keeps the log off it."""
    logger.info("%s", message)
    if logging.lastResort is None and sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)


def _entry(config: StackConfig, progress: Progress) -> _Held:
    stacks = _held.setdefault(asyncio.get_running_loop(), {})
    key = config.digest()
    if key not in stacks:
        stacks[key] = _start(config, progress)
    return stacks[key]


def _start(config: StackConfig, progress: Progress) -> _Held:
    holder = _holder(config, progress)
    return _Held(holder, asyncio.ensure_future(anext(holder)))


async def _holder(config: StackConfig, progress: Progress) -> AsyncGenerator[Stack, None]:
    async with acquire(config, progress=progress) as stack:
        yield stack


async def _ready(entry: _Held, config: StackConfig) -> Stack:
    try:
        return await asyncio.shield(entry.starting)
    except BaseException:
        stacks = _held.get(asyncio.get_running_loop(), {})
        if entry.starting.done() and stacks.get(config.digest()) is entry:
            del stacks[config.digest()]
        raise
