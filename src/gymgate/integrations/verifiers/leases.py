"""The stack that each event loop's rollouts share, by config.

The env holds its stack from start to stop. A harness that runs without our env (`--env.id best-of-n`) takes one on
its first rollout and keeps it until its loop ends. Nothing here is shared between loops, so there is no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from gymgate.config import StackConfig
from gymgate.integrations.verifiers import early
from gymgate.stack import Stack, connect

logger = logging.getLogger("verifiers.v1.gymgate")
"""Below verifiers' own logger: the only place from which records reach the console and eval.log."""


@dataclass
class _Held:
    """A stack, starting or up."""

    starting: asyncio.Task[Stack]
    users: int = 0
    """Envs that hold it; one that no env holds is kept until its loop ends."""
    until_loop_ends: AsyncGenerator[None, None] | None = None

    async def close(self) -> None:
        self.starting.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await (await self.starting).close()


_held: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[StackConfig, _Held]] = WeakKeyDictionary()


async def stack_for(config: StackConfig) -> Stack:
    """This loop's stack for `config`, started if it is not up.

    Everyone who waits for a start that fails gets its error; the next call tries again. Cancelling a waiter leaves
    the start to the others.
    """
    entry = _entry(config)
    stack = await _ready(entry, config)
    if not entry.users and entry.until_loop_ends is None:
        entry.until_loop_ends = _close_when_loop_ends(stack)
        await anext(entry.until_loop_ends)
    return stack


async def hold(config: StackConfig) -> Stack:
    """As `stack_for`, and keep it until as many `release` calls."""
    entry = _entry(config)
    entry.users += 1
    return await _ready(entry, config)


async def release(config: StackConfig) -> None:
    """Undo one `hold`, whether it succeeded or not; the last one gives the lease back."""
    stacks = _stacks()
    entry = stacks.get(config)
    if entry is None:
        return
    entry.users -= 1
    if entry.users <= 0 and entry.until_loop_ends is None:
        del stacks[config]
        await entry.close()


async def forget(config: StackConfig, stack: Stack) -> None:
    """Replace a stack that was lost, so that the next rollout gets another."""
    entry = _stacks().get(config)
    if entry is not None and entry.starting.done() and entry.starting.result() is stack:
        entry.starting = _start(config)
        with contextlib.suppress(Exception):
            await stack.close()


def say(message: str) -> None:
    """Log a progress line; on the terminal too where verifiers' dashboard keeps the log off it."""
    logger.info("%s", message)
    if logging.lastResort is None and sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)


def _stacks() -> dict[StackConfig, _Held]:
    return _held.setdefault(asyncio.get_running_loop(), {})


def _entry(config: StackConfig) -> _Held:
    stacks = _stacks()
    if config not in stacks:
        stacks[config] = _Held(_start(config))
    return stacks[config]


def _start(config: StackConfig) -> asyncio.Task[Stack]:
    return asyncio.ensure_future(_connect(config))


async def _connect(config: StackConfig) -> Stack:
    early.acquiring(config)
    stack = await connect(config, progress=say)
    early.acquired()
    return stack


async def _ready(entry: _Held, config: StackConfig) -> Stack:
    try:
        return await asyncio.shield(entry.starting)
    except BaseException:
        if entry.starting.done() and _stacks().get(config) is entry:
            del _stacks()[config]
        raise


async def _close_when_loop_ends(stack: Stack) -> AsyncGenerator[None, None]:
    """Once started it is closed by `shutdown_asyncgens`, with which every event loop's runner ends."""
    try:
        yield
    finally:
        await stack.close()
