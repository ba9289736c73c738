"""Task groups that raise the first error of their tasks as itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """An `asyncio.TaskGroup` that raises its first error, also of a group within it, as itself and with its own cause."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__  # `from None` would erase it


@asynccontextmanager
async def beside(work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run tasks beside the body and cancel them when it is done; the first error of either ends both, as itself."""
    async with task_group() as group:
        tasks = [group.create_task(coroutine) for coroutine in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
