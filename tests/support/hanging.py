"""A callback that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Hanging:
    """Handles a peer's calls and never answers."""

    def __init__(self, on_call: Callable[[], object] = lambda: None) -> None:
        self.calls = 0
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        """Set when a call was cancelled."""
        self._on_call = on_call

    async def __call__(self, message: dict[str, Any], payload: bytes) -> None:
        self.calls += 1
        self.begun.set()
        self._on_call()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
