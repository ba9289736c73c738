"""Start something once for everyone who asks for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from gymgate.core.errors import StackLostError

T = TypeVar("T")


class SharedStart(Generic[T]):
    """Starts something for the first caller of `get`; later callers get the same. Belongs to one event loop.

    Everyone who waits for a start that fails gets its error; the next caller starts it anew. Cancelling a caller does not
    cancel the start; `stop` does, and those who wait get `StackLostError`. `usable` tells whether what was started still
    serves; if not, the next caller starts it anew, too.
    """

    def __init__(
        self, start: Callable[[], Coroutine[Any, Any, T]], usable: Callable[[T], bool] = lambda _: True
    ) -> None:
        self._start = start
        self._usable = usable
        self._task: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return what was started. Raises the error that the start failed with."""
        caller = asyncio.current_task()
        if self._task is None or (self._task.done() and self.value is None):
            self._task = asyncio.create_task(self._start())
            self._task.add_done_callback(_retrieve)
        task = self._task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if not task.cancelled() or (caller is not None and caller.cancelling()):
                raise
            raise StackLostError("closed while it started") from error

    @property
    def value(self) -> T | None:
        """What was started, if it is there and usable."""
        result = _result(self._task)
        return result if result is not None and self._usable(result) else None

    async def stop(self) -> T | None:
        """Cancel a start under way, and return what was started, usable or not, for the caller to close."""
        task, self._task = self._task, None
        if task is None:
            return None
        task.cancel()
        await asyncio.wait([task])
        return _result(task)


def _result(task: asyncio.Task[T] | None) -> T | None:
    if task is None or not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Mark an error as seen: everyone who waited has got it, and there may be nobody."""
    if not task.cancelled():
        task.exception()
