"""A gate that callers on any event loop wait at, and any thread opens and closes."""

from __future__ import annotations

import asyncio
import threading


class Gate:
    """Open at first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: set[asyncio.Future[None]] = set()

    def close(self) -> None:
        """Hold whoever comes from now on."""
        with self._lock:
            self._closed = True

    def open(self) -> None:
        """Let everyone through."""
        with self._lock:
            self._closed = False
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            future.get_loop().call_soon_threadsafe(_release, future)

    async def wait(self) -> None:
        """Return at once if open, else when it opens."""
        with self._lock:
            if not self._closed:
                return
            future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
        try:
            await future
        finally:
            with self._lock:
                self._waiting.discard(future)


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
