"""A stack that starts while verifiers is imported, so that the eval finds it up, or nearly."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from gymgate.config import StackConfig
from gymgate.integrations.verifiers.knobs import Knobs
from gymgate.stack import acquire
from gymgate.stack.client import Progress
from gymgate.stack.sync import LoopThread

PREFIX = "env.taskset."


class EarlyStack:
    """Holds a lease from its start until `release`, on an event loop in a thread of its own.

    Whoever acquires the same config joins the stack. A start that fails is not told here: the one who needs the stack
    tries again and tells.
    """

    def __init__(self, config: StackConfig, progress: Progress) -> None:
        self.config = config
        self._progress = progress
        self._loop = LoopThread()
        self._loop.enter()
        self._holding = self._loop.submit(self._hold())

    def release(self) -> None:
        """Give the lease back, or give up starting; does not wait for it. Idempotent."""
        self._holding.cancel()

    def close(self) -> None:
        """Release and wait until that is done."""
        self.release()
        self._loop.leave()

    async def _hold(self) -> None:
        async with acquire(self.config, progress=self._progress):
            await asyncio.Event().wait()


_early: EarlyStack | None = None


@contextmanager
def starting(settings: Mapping[str, Any], progress: Progress) -> Iterator[None]:
    """The stack that an eval's settings (dotted key -> value) describe, starting meanwhile; nothing where they describe none."""
    global _early
    try:
        config = knobs_of(settings).stack_config()
    except ValidationError:  # verifiers says it better
        yield
        return
    _early = EarlyStack(config, progress)
    try:
        yield
    finally:
        _early.close()
        _early = None


def knobs_of(settings: Mapping[str, Any]) -> Knobs:
    """The knobs among an eval's settings."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        if not name.startswith(PREFIX):
            continue
        *path, last = name.removeprefix(PREFIX).split(".")
        if (path or [last])[0] not in Knobs.model_fields:
            continue
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[last] = None if value == "None" else value
    return Knobs.model_validate(nested)


def acquiring(config: StackConfig) -> None:
    """Release the early stack if it is another one than the eval is about to acquire: two would share the machine."""
    if _early is not None and _early.config != config:
        _early.release()


def acquired() -> None:
    """Release the early stack: the eval holds a lease of its own."""
    if _early is not None:
        _early.release()
