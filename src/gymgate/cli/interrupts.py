"""Work that SIGINT and SIGTERM cancel, so that it stops what it started."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

import click

from gymgate.core.errors import GymgateError

INTERRUPTED = 130


def run_interruptibly(work: Coroutine[Any, Any, None]) -> tuple[bool, GymgateError | None]:
    """Run `work` to its end; returns whether it was interrupted, and the `GymgateError` that ended it early, if one did.

    The first SIGINT or SIGTERM cancels it, and what it started is stopped; the second ends this process at once. A stack
    does not outlive that: it stops when the last process with a lease is gone.
    """
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_cancelled_by_signals(work))
        except (asyncio.CancelledError, KeyboardInterrupt):
            return True, None
        except GymgateError as error:
            return False, error
    return False, None


def serve_interruptibly(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it is interrupted, and exit with `INTERRUPTED` then. Raises the error that ended it early."""
    interrupted, error = run_interruptibly(work)
    if error is not None:
        raise error
    if interrupted:
        raise click.exceptions.Exit(INTERRUPTED)


async def _cancelled_by_signals(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.current_task()
    assert task is not None
    signals = 0

    def interrupt() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            os.write(2, b"\x1b[?25h\ninterrupted twice\n" if os.isatty(2) else b"interrupted twice\n")
            os._exit(INTERRUPTED)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        await work
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
