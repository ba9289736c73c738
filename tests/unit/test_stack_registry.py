"""Who holds a connection of this process: shared by config and loop, replaced once lost, given back by the last user."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.config import StackConfig
from gymgate.errors import StackLostError, StackStartError
from gymgate.stack import leases as module
from gymgate.stack.launch import DaemonAddress
from gymgate.stack.leases import ATTEMPTS, Lease, Registry, connect

CONFIG = StackConfig(environments=("none",))


class FakeConnection:
    """A connection whose daemon answers `hello` as told."""

    def __init__(self, registry: FakeRegistry, error: BaseException | None, *, heard: bool) -> None:
        self.peer = SimpleNamespace(lost=asyncio.Event(), heard=heard)
        self.progress: list[Any] = []
        self._registry, self._error = registry, error

    async def hello(self, config: StackConfig) -> None:
        await self._registry.answering.wait()
        if self._error is not None:
            raise self._error


class FakeRegistry(Registry):
    """A registry that opens no sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.answering = asyncio.Event()
        self.answering.set()
        self.closing = asyncio.Event()
        self.closing.set()
        self.errors: list[tuple[BaseException, bool]] = []
        """Of the next `hello`s, with whether the daemon had said anything."""
        self.opened: list[FakeConnection] = []
        self.closed: list[FakeConnection] = []

    def address(self, *_: Any) -> DaemonAddress:
        return DaemonAddress(Path("none.sock"), Path("none"))

    async def open(self, address: Any) -> Any:
        error, heard = self.errors.pop(0) if self.errors else (None, True)
        self.opened.append(FakeConnection(self, error, heard=heard))
        return self.opened[-1]

    async def close(self, connection: Any) -> None:
        await self.closing.wait()
        self.closed.append(connection)


@pytest.fixture
async def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    made = FakeRegistry()
    monkeypatch.setattr(module, "current_registry", lambda: made)
    return made


def held(registry: Registry) -> list[Lease]:
    return list(registry._leases.get(asyncio.get_running_loop(), {}).values())


async def test_a_connection_is_shared_and_the_last_user_gives_it_back(registry: FakeRegistry) -> None:
    first, second = await asyncio.gather(connect(CONFIG), connect(CONFIG))
    assert len(registry.opened) == 1
    await first.close()
    assert (registry.closed, len(held(registry))) == ([], 1)
    await second.close()
    assert (registry.closed, held(registry)) == (registry.opened, [])


async def test_a_lost_connection_is_replaced_and_giving_it_back_leaves_the_new_one(
    registry: FakeRegistry,
) -> None:
    old = await connect(CONFIG)
    registry.opened[0].peer.lost.set()
    new = await connect(CONFIG)
    assert len(registry.opened) == 2
    await old.close()
    assert len(held(registry)) == 1
    third = await connect(CONFIG)
    assert len(registry.opened) == 2  # the new one is still found
    await new.close()
    assert registry.closed == registry.opened[:1]
    await third.close()
    assert registry.closed == registry.opened


async def test_a_failed_start_is_told_to_all_and_leaves_nothing(registry: FakeRegistry) -> None:
    registry.errors = [(StackStartError("no"), True)]
    registry.answering.clear()
    waiting = [asyncio.create_task(connect(CONFIG)) for _ in range(2)]
    while not (leases := held(registry)) or leases[0].users < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    registry.answering.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in found] == ["no", "no"]
    assert (len(registry.opened), held(registry)) == (1, [])
    await (await connect(CONFIG)).close()
    assert len(registry.opened) == 2


async def test_who_asks_before_all_have_heard_of_a_failed_start_starts_anew(registry: FakeRegistry) -> None:
    registry.errors = [(StackStartError("no"), True)]
    registry.answering.clear()
    waiting = asyncio.create_task(connect(CONFIG))
    while not registry.opened:  # noqa: ASYNC110
        await asyncio.sleep(0)
    [failed] = held(registry)
    failed.users += 1  # one that has not heard yet
    registry.answering.set()
    with pytest.raises(StackStartError):
        await waiting
    assert held(registry) == [failed]
    await (await connect(CONFIG)).close()
    assert len(registry.opened) == 2


async def test_a_daemon_that_was_about_to_exit_is_tried_again(registry: FakeRegistry) -> None:
    gone = [(StackLostError("gone"), False)] * (ATTEMPTS - 1)
    registry.errors = [*gone]
    await (await connect(CONFIG)).close()
    assert len(registry.opened) == ATTEMPTS
    registry.errors = [*gone, *gone]
    with pytest.raises(StackStartError, match="gone"):
        await connect(CONFIG)
    assert len(registry.opened) == 2 * ATTEMPTS
    assert (registry.closed, held(registry)) == (registry.opened, [])


async def test_a_daemon_that_answered_before_it_was_lost_is_not_tried_again(registry: FakeRegistry) -> None:
    registry.errors = [(StackLostError("crashed"), True)]
    with pytest.raises(StackLostError, match="crashed"):
        await connect(CONFIG)
    assert len(registry.opened) == 1


async def test_a_cancelled_waiter_leaves_the_start_to_the_others(registry: FakeRegistry) -> None:
    registry.answering.clear()
    waiting = [asyncio.create_task(connect(CONFIG)) for _ in range(2)]
    while not (leases := held(registry)) or leases[0].users < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    registry.answering.set()
    stack = await waiting[1]
    assert (len(registry.opened), registry.closed) == (1, [])
    await stack.close()


async def test_a_last_user_who_is_cancelled_gives_the_lease_back_all_the_same(registry: FakeRegistry) -> None:
    stack = await connect(CONFIG)
    registry.closing.clear()
    leaving = asyncio.create_task(stack.close())
    while held(registry):  # noqa: ASYNC110
        await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    registry.closing.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert registry.closed == registry.opened


async def test_progress_goes_to_those_who_wait(registry: FakeRegistry) -> None:
    registry.answering.clear()
    told: list[str] = []
    waiting = asyncio.create_task(connect(CONFIG, progress=told.append))
    while not registry.opened:  # noqa: ASYNC110
        await asyncio.sleep(0)
    [lease] = held(registry)
    assert lease.progress == [told.append]
    registry.answering.set()
    stack = await waiting
    assert lease.progress == []
    await stack.close()
