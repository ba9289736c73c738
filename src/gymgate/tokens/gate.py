"""A gate that callers on any event loop pass, and any thread closes and opens."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator


class Gate:
    """Open at first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._waiting: set[asyncio.Future[None]] = set()
        self._inside = 0

    @property
    def inside(self) -> int:
        """How many have passed and not left."""
        return self._inside

    def close(self, wait_s: float = 0.0) -> int:
        """Hold whoever comes from now on; wait at most `wait_s` for those inside to leave, and return how many have not.

        With `wait_s` it blocks its thread, which must not be one whose event loop those inside need.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._inside, timeout=wait_s)
            return self._inside

    def open(self) -> None:
        """Let everyone through."""
        with self._changed:
            self._closed = False
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
                future.get_loop().call_soon_threadsafe(_release, future)

    @contextlib.asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Wait until it is open, and be inside for the length of the block."""
        while (future := self._enter()) is not None:
            try:
                await future
            finally:
                with self._changed:
                    self._waiting.discard(future)
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _enter(self) -> asyncio.Future[None] | None:
        """`None` for who is now inside, else what to wait for."""
        with self._changed:
            if not self._closed:
                self._inside += 1
                return None
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            return future


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
