"""Something that is started once: who gets it, who gets its error, and what ends it."""

from __future__ import annotations

import asyncio

import pytest

from gymgate.core.errors import StackLostError
from gymgate.core.starting import SharedStart


class Service:
    """Starts once `go` is set; fails as told."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.starts = 0
        self.error: Exception | None = None
        self.broken: set[int] = set()
        self.shared = SharedStart(self._start, usable=lambda number: number not in self.broken)

    async def _start(self) -> int:
        self.starts += 1
        number = self.starts
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return number


async def test_everyone_gets_the_same() -> None:
    service = Service()
    waiting = [asyncio.create_task(service.shared.get()) for _ in range(3)]
    await asyncio.sleep(0)
    assert service.shared.value is None
    service.go.set()
    assert [await task for task in waiting] == [1, 1, 1]
    assert (await service.shared.get(), service.shared.value, service.starts) == (1, 1, 1)


async def test_everyone_who_waits_gets_the_error_and_the_next_starts_anew() -> None:
    service = Service()
    service.error = ValueError("no")
    waiting = [asyncio.create_task(service.shared.get()) for _ in range(2)]
    service.go.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in found] == ["no", "no"]
    service.error = None
    assert await service.shared.get() == 2


async def test_a_cancelled_caller_leaves_the_start_to_the_others() -> None:
    service = Service()
    first, second = (asyncio.create_task(service.shared.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    service.go.set()
    assert (await second, service.starts) == (1, 1)


async def test_what_is_not_usable_any_more_is_started_anew() -> None:
    service = Service()
    service.go.set()
    assert await service.shared.get() == 1
    service.broken.add(1)
    assert service.shared.value is None
    assert await service.shared.get() == 2
    service.broken.add(2)
    assert await service.shared.stop() == 2


async def test_stop_cancels_a_start_and_not_those_who_wait() -> None:
    """In a task group, somebody who ends as if cancelled would be missed by nobody."""
    service = Service()
    assert await service.shared.stop() is None
    waiting, cancelled = (asyncio.create_task(service.shared.get()) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await service.shared.stop() is None
    with pytest.raises(StackLostError, match="closed"):
        await waiting
    with pytest.raises(asyncio.CancelledError):
        await cancelled
