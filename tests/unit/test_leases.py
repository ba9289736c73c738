"""A stack's lease: taken and given back once, tried again when its daemon was about to exit, replaced when it was lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from gymgate.core.config import RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, StackLostError, StackStartError
from gymgate.stack import acquisition
from gymgate.stack.acquisition import connect
from gymgate.stack.client import leases as module
from gymgate.stack.client import stack as client
from gymgate.stack.client.launch import DaemonAddress
from gymgate.stack.client.leases import ATTEMPTS, Leases

CONFIG = StackConfig(environments=("none",))


class FakeLease:
    """A connection whose daemon answers `hello` as told."""

    def __init__(self, leases: FakeLeases, error: BaseException | None, *, heard: bool) -> None:
        self.peer = SimpleNamespace(lost=asyncio.Event(), heard=heard)
        self.progress: Any = None
        self.agents: dict[str, Any] = {}
        self.description: dict[str, Any] = {"names": {}}
        self.loop = asyncio.get_running_loop()
        self._leases, self._error = leases, error

    async def hello(self, config: StackConfig) -> None:
        await self._leases.answering.wait()
        if self._error is not None:
            raise self._error


class FakeLeases(Leases):
    """Leases that open no sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.answering = asyncio.Event()
        self.answering.set()
        self.closing = asyncio.Event()
        self.closing.set()
        self.errors: list[tuple[BaseException, bool]] = []
        """Of the next `hello`s, with whether the daemon had said anything."""
        self.opened: list[FakeLease] = []
        self.closed: list[FakeLease] = []

    def address(self, *_: Any) -> DaemonAddress:
        return DaemonAddress(Path("none.sock"), Path("none"))

    async def open(self, address: Any) -> Any:
        error, heard = self.errors.pop(0) if self.errors else (None, True)
        self.opened.append(FakeLease(self, error, heard=heard))
        return self.opened[-1]

    async def close(self, connection: Any) -> None:
        await self.closing.wait()
        self.closed.append(connection)


@pytest.fixture
async def leases(monkeypatch: pytest.MonkeyPatch) -> FakeLeases:
    made = FakeLeases()
    monkeypatch.setattr(acquisition, "current_leases", lambda: made)
    return made


async def test_each_stack_has_a_lease_of_its_own(leases: FakeLeases) -> None:
    first, second = await asyncio.gather(connect(CONFIG), connect(CONFIG))
    assert len(leases.opened) == 2
    await first.close()
    await first.close()
    assert len(leases.closed) == 1
    await second.close()
    assert set(leases.closed) == set(leases.opened)


async def test_a_lost_stack_is_connected_again_by_who_asks_next(leases: FakeLeases) -> None:
    stack = await connect(CONFIG, reconnect=True)
    leases.opened[0].peer.lost.set()
    leases.answering.clear()
    waiting = [asyncio.create_task(stack._current_lease()) for _ in range(2)]
    while len(leases.opened) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    leases.answering.set()
    assert [await task for task in waiting] == leases.opened[1:] * 2
    assert leases.closed == leases.opened[:1]
    await stack.close()
    assert leases.closed == leases.opened


async def test_a_stack_that_cannot_be_connected_again_is_tried_again(leases: FakeLeases) -> None:
    stack = await connect(CONFIG, reconnect=True)
    leases.opened[0].peer.lost.set()
    leases.errors = [(StackStartError("no room"), True)]
    with pytest.raises(StackStartError, match="no room"):
        await stack._current_lease()
    await stack._current_lease()
    await stack.close()
    assert set(leases.closed) == set(leases.opened)


async def test_without_reconnect_a_lost_stack_stays_lost(leases: FakeLeases) -> None:
    stack = await connect(CONFIG)
    leases.opened[0].peer.lost.set()
    assert await stack._current_lease() is leases.opened[0]
    await stack.close()
    with pytest.raises(StackLostError, match="closed"):
        await stack._current_lease()


async def test_closing_gives_up_a_connection_under_way(leases: FakeLeases) -> None:
    stack = await connect(CONFIG, reconnect=True)
    leases.opened[0].peer.lost.set()
    leases.answering.clear()
    waiting = asyncio.create_task(stack._current_lease())
    while len(leases.opened) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await stack.close()
    assert set(leases.closed) == set(leases.opened)
    with pytest.raises(StackLostError, match="closed"):
        await waiting


async def test_a_rollout_does_not_wait_for_a_stack_beyond_its_deadline(
    leases: FakeLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "GRACE_S", 0.01)
    stack = await connect(CONFIG, reconnect=True)
    leases.opened[0].peer.lost.set()
    leases.answering.clear()
    async with asyncio.timeout(30):
        rollout = await stack.run(
            {"responses_create_params": {"input": "hi"}},
            policy=lambda request: request,
            limits=RolloutLimits(timeout_s=0.1),
            rollout_id="mine",
        )
    assert rollout.error is not None
    assert (rollout.id, rollout.error.type, stack._callables) == ("mine", "RolloutTimeoutError", {})
    await stack.close()
    assert set(leases.closed) == set(leases.opened)


async def test_a_policy_that_cannot_be_used_leaves_no_function(leases: FakeLeases) -> None:
    stack = await connect(CONFIG)
    row = {"responses_create_params": {"input": "hi"}}
    with pytest.raises(ConfigError, match="rollout_id"):
        await stack.run(row, policy=lambda request: request, rollout_id="x" * 1000)
    with pytest.raises(ConfigError, match="is a string"):
        await stack.run(row, policy=lambda request: request, judge_policy="http://h/v1")  # type: ignore[arg-type]
    assert stack._callables == {}


async def test_what_a_rollout_asks_of_the_daemon(leases: FakeLeases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's agent goes before the row's; a callable that judges is another one than the policy."""
    asked: list[Any] = []

    async def refuse(method: str, message: Any, body: bytes) -> None:
        asked.append((method, message))
        await asyncio.sleep(0.2)  # beyond the rollout's deadline, within the grace
        raise StackLostError("late")

    monkeypatch.setattr(client, "GRACE_S", 30.0)
    stack = await connect(CONFIG)
    leases.opened[0].peer.exchange = refuse
    row = {"responses_create_params": {"input": "hi"}, "agent_ref": {"name": "theirs"}}
    for agent, expected in ((None, "theirs"), ("mine", "mine")):
        with pytest.raises(StackLostError, match="late"):
            await stack.run(
                row,
                policy=lambda request: request,
                judge_policy=lambda request: request,
                agent=agent,
                limits=RolloutLimits(timeout_s=0.1),
            )
        method, message = asked.pop()
        assert (method, message["agent"]) == ("run", expected)
        assert message["policy"]["name"] != message["judge_policy"]["name"]
    await stack.close()


async def test_a_stack_of_another_process_is_lost(leases: FakeLeases) -> None:
    """As in a forked child, which has no connection of its own."""
    stack = await connect(CONFIG)
    stack._pid += 1
    with pytest.raises(StackLostError, match="acquire it again"):
        await stack._current_lease()
    await stack.close()


@pytest.mark.parametrize("shared", [False, True])
async def test_a_daemon_that_hangs_is_killed_by_its_only_user(shared: bool) -> None:
    """Others may use a shared one: its process is named instead."""
    daemon = Mock()
    lease = client.Lease(lambda: "gone", daemon)
    lease._shared, lease._daemon_pid = shared, 4242
    lease._give_up()
    assert daemon.kill.called == (not shared)
    assert ("4242" in lease.peer.describe_loss()) == shared


async def test_warnings_after_the_start_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    lease = client.Lease(lambda: "gone", None)
    for line in ("warning: mcqa: a server died", "mcqa: starting"):
        lease._on_progress({"message": line})
    assert caplog.messages == ["mcqa: a server died"]


async def test_a_failed_start_leaves_nothing(leases: FakeLeases) -> None:
    leases.errors = [(StackStartError("no"), True)]
    with pytest.raises(StackStartError, match="no"):
        await connect(CONFIG)
    assert leases.closed == leases.opened


async def test_a_daemon_that_was_about_to_exit_is_tried_again(leases: FakeLeases) -> None:
    gone = [(StackLostError("gone"), False)] * (ATTEMPTS - 1)
    leases.errors = [*gone]
    await (await connect(CONFIG)).close()
    assert len(leases.opened) == ATTEMPTS
    leases.errors = [*gone, *gone]
    with pytest.raises(StackStartError, match="gone"):
        await connect(CONFIG)
    assert len(leases.opened) == 2 * ATTEMPTS
    assert leases.closed == leases.opened


async def test_a_daemon_that_answered_before_it_was_lost_is_not_tried_again(leases: FakeLeases) -> None:
    leases.errors = [(StackLostError("crashed"), True)]
    with pytest.raises(StackLostError, match="crashed"):
        await connect(CONFIG)
    assert len(leases.opened) == 1


async def test_a_cancelled_start_leaves_nothing(leases: FakeLeases) -> None:
    leases.answering.clear()
    waiting = asyncio.create_task(connect(CONFIG))
    while not leases.opened:  # noqa: ASYNC110
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert leases.closed == leases.opened


async def test_who_is_cancelled_while_closing_gives_the_lease_back_all_the_same(
    leases: FakeLeases,
) -> None:
    stack = await connect(CONFIG)
    leases.closing.clear()
    leaving = asyncio.create_task(stack.close())
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    leases.closing.set()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert leases.closed == leases.opened


async def test_progress_goes_to_who_waits(leases: FakeLeases) -> None:
    leases.answering.clear()
    told: list[str] = []
    waiting = asyncio.create_task(connect(CONFIG, progress=told.append))
    while not leases.opened:  # noqa: ASYNC110
        await asyncio.sleep(0)
    [connection] = leases.opened
    assert connection.progress == told.append
    leases.answering.set()
    stack = await waiting
    assert connection.progress is None
    await stack.close()


@pytest.mark.parametrize("others", [0, 1])
async def test_a_daemon_that_does_not_say_goodbye_is_ended_by_its_last_user(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may only be busy, with the rollouts of another lease of this process."""
    ended: list[Any] = []
    monkeypatch.setattr(module, "_reap", ended.append)
    leases, daemon = Leases(), object()

    async def unanswered() -> bool:
        return True

    class Silent:
        def __init__(self) -> None:
            self.daemon, self.goodbye = daemon, unanswered

    taken: list[Any] = [Silent() for _ in range(1 + others)]
    leases._taken.update(taken)
    await leases.close(taken[0])
    assert ended == [daemon] * (not others)
