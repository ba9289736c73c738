"""When a daemon stops, and what it leaves: its stack is none of NeMo Gym's."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.config import StackConfig
from gymgate.core.errors import StackLostError, StackStartError
from gymgate.stack.client import stack as client
from gymgate.stack.client.stack import Lease
from gymgate.stack.daemon.process import Daemon
from gymgate.stack.protocol import PROTOCOL, Peer
from support.hanging import Hanging

CONFIG = StackConfig(environments=("none",))


class Bare(Daemon):
    """A daemon whose stack starts at once, or with `fails` not at all."""

    fails = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.peers: list[Peer] = []
        """Both ends of every connection."""
        self.accepted = asyncio.Semaphore(0)

    def _connected(self) -> Peer:
        self.peers.append(super()._connected())
        self.accepted.release()
        return self.peers[-1]

    async def _start_stack(self, config: StackConfig) -> Any:
        if self.fails:
            self.retire()
            raise StackStartError("on purpose")
        return SimpleNamespace(config=config, describe=lambda: {"agents": {}, "gateway_url": ""}, status=dict)


@asynccontextmanager
async def serving(directory: Path, *, number: int | None = None) -> AsyncIterator[Bare]:
    """A daemon, with its listening socket under this descriptor; it has ended at the end of the block."""
    path, interrupt = directory / "s.sock", signal.getsignal(signal.SIGINT)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        if number is not None:
            listener = socket.socket(fileno=fcntl.fcntl(listener.detach(), fcntl.F_DUPFD_CLOEXEC, number))
        daemon = Bare(listener, path, directory, os.getppid())
        running = asyncio.create_task(daemon.serve())
        try:
            yield daemon
            async with asyncio.timeout(10):
                await running
        finally:
            daemon.retire()
            await running
            for peer in daemon.peers:
                peer.abort()
                await peer.lost.wait()
            signal.signal(signal.SIGINT, interrupt)
            listener.close()


async def connected(daemon: Bare) -> Lease:
    """A connection that has not said hello."""
    connection = Lease(lambda: "gone", None)
    daemon.peers.append(connection.peer)
    await asyncio.get_running_loop().create_unix_connection(lambda: connection.peer, str(daemon.path))
    return connection


async def leased(daemon: Bare, config: StackConfig = CONFIG) -> Lease:
    connection = await connected(daemon)
    await connection.hello(config)
    return connection


@pytest.mark.parametrize("number", [None, 2000])
async def test_a_daemon_stops_when_its_last_lease_is_given_back(tmp_path: Path, number: int | None) -> None:
    """Whatever the number of its listening socket's descriptor."""
    async with serving(tmp_path, number=number) as daemon:
        first, second = await leased(daemon), await leased(daemon)
        assert await first.peer.call("bye") == {"last": False}
        assert daemon.path.exists()
        assert (await second.peer.call("status"))["leases"] == 1
        assert await second.peer.call("bye") == {"last": True}
        assert not daemon.path.exists()


async def test_a_daemon_that_is_used_has_no_time_to_stop(tmp_path: Path) -> None:
    async with serving(tmp_path) as daemon:
        connection = await connected(daemon)
        assert daemon._timer is not None, "nobody has said hello"
        await connection.hello(CONFIG)
        assert daemon._timer is None
        await connection.peer.call("bye")


@pytest.mark.parametrize(("share", "lingers_s"), [("machine", 5.0), ("process", 0.0)])
async def test_a_stack_of_the_machine_outlives_the_process_that_started_it(
    tmp_path: Path, share: Any, lingers_s: float
) -> None:
    """That of a process does so as long as somebody holds a lease, such as a forked child."""
    config = CONFIG.model_copy(update={"share": share, "linger_s": 5.0})
    async with serving(tmp_path) as daemon:
        await leased(daemon, config)
        daemon._starter_gone()
        assert not daemon.is_retired
        assert daemon._linger_s == lingers_s
        daemon.retire()


async def test_another_protocol_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as daemon:
        connection = await connected(daemon)
        with pytest.raises(StackLostError, match=f"{PROTOCOL + 1}"):
            await connection.peer.call("hello", protocol=PROTOCOL + 1, config={"environments": ["none"]})
        connection.peer.abort()


async def test_a_daemon_that_crashes_in_a_start_was_heard_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nobody takes it for one that was about to exit, and starts it again."""

    async def crash(config: StackConfig) -> Any:
        next(iter(daemon.leases)).peer.abort()
        await asyncio.Event().wait()

    async with serving(tmp_path) as daemon, asyncio.timeout(30):
        monkeypatch.setattr(daemon, "started", crash)
        connection = await connected(daemon)
        with pytest.raises(StackLostError):
            await connection.hello(CONFIG)
        assert connection.peer.heard


async def test_a_busy_daemon_that_shows_signs_of_life_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PING_S", 0.01)
    hanging = Hanging()
    async with serving(tmp_path) as daemon, asyncio.timeout(30):
        connection = await leased(daemon)
        next(iter(daemon.leases)).peer.handlers["hang"] = hanging
        calling = asyncio.create_task(connection.peer.call("hang"))
        while connection.peer.heard < 3 * client.MAX_MISSED and not calling.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not connection.peer.lost.is_set()
        calling.cancel()
        await connection.peer.call("bye")


@pytest.mark.parametrize("hello", [False, True])
async def test_a_daemon_stops_when_its_last_connection_is_lost(tmp_path: Path, hello: bool) -> None:
    async with serving(tmp_path) as daemon:
        (await (leased(daemon) if hello else connected(daemon))).peer.abort()


async def test_a_daemon_lingers_until_somebody_comes_back(tmp_path: Path) -> None:
    lingering = CONFIG.model_copy(update={"linger_s": 0.2})
    async with serving(tmp_path) as daemon:
        for _ in range(2):
            assert await (await leased(daemon, lingering)).peer.call("bye") == {"last": False}
        assert daemon.path.exists()


async def test_who_is_connecting_keeps_the_daemon(tmp_path: Path) -> None:
    """Its connection waits to be accepted when the last lease is given back."""
    async with serving(tmp_path) as daemon:
        await leased(daemon)
        with socket.socket(socket.AF_UNIX) as connecting:
            connecting.connect(str(daemon.path))
            assert not daemon.release(next(iter(daemon.leases)))


async def test_who_comes_too_late_loses_the_connection_and_hears_nothing(tmp_path: Path) -> None:
    """So it tries again, with another daemon, whose socket stays although this one stops again."""
    async with serving(tmp_path) as daemon:
        late = await connected(daemon)
        while not daemon.leases:  # noqa: ASYNC110
            await asyncio.sleep(0)
        daemon.retire()
        daemon.path.touch()
        daemon.retire()
        assert daemon.path.exists()
        with pytest.raises(StackLostError):
            await late.hello(CONFIG)
        assert not late.peer.heard


async def test_all_who_wait_for_a_start_that_fails_get_its_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as daemon:
        daemon.fails = True
        waiting = [await connected(daemon) for _ in range(20)]
        found = await asyncio.gather(*(each.hello(CONFIG) for each in waiting), return_exceptions=True)
        assert [type(error) for error in found] == [StackStartError] * 20
        for connection in waiting:
            assert await connection.peer.call("bye") == {"last": True}


async def observed(daemon: Bare) -> Peer:
    """A connection that has said that it only observes, and was heard."""
    peer = (await connected(daemon)).peer
    peer.tell("observe")
    assert (await peer.call("report"))["state"] in ("starting", "ready")
    return peer


async def test_who_observes_neither_keeps_nor_stops_a_daemon(tmp_path: Path) -> None:
    async with serving(tmp_path) as daemon:
        holder = await leased(daemon)
        peer = await observed(daemon)
        assert (await peer.call("report"))["leases"] == 1
        (await observed(daemon)).abort()
        assert await holder.peer.call("bye") == {"last": True}


async def test_a_daemon_lingers_as_long_as_anybody_asked_for(tmp_path: Path) -> None:
    async with serving(tmp_path) as daemon:
        first = await leased(daemon, CONFIG.model_copy(update={"linger_s": 600}))
        second = await leased(daemon)
        assert [await each.peer.call("bye") for each in (first, second)] == [{"last": False}] * 2
        assert not daemon.is_retired
        daemon.retire()


async def test_who_observes_a_lingering_daemon_leaves_its_time_as_it_is(tmp_path: Path) -> None:
    lingering = CONFIG.model_copy(update={"linger_s": 600})
    async with serving(tmp_path) as daemon:
        assert await (await leased(daemon, lingering)).peer.call("bye") == {"last": False}
        timer = daemon._timer
        assert timer is not None
        peer = await observed(daemon)
        peer.abort()
        await peer.lost.wait()
        assert (daemon.is_retired, daemon._timer) == (False, timer)
        daemon.retire()


async def test_who_observes_does_not_count_as_the_first_lease(tmp_path: Path) -> None:
    """Nor does its report wait for a start."""
    async with serving(tmp_path) as daemon:
        starter = await connected(daemon)
        peer = await observed(daemon)
        assert (await peer.call("report"))["state"] == "starting"
        await starter.hello(CONFIG)
        assert (await peer.call("report"))["state"] == "ready"
        starter.peer.abort()


@pytest.mark.parametrize("orphaned", [False, True])
async def test_an_end_that_an_observer_held_back_comes_when_it_says_what_it_is(
    tmp_path: Path, orphaned: bool
) -> None:
    """Until its first message arrives it counts as a lease."""
    config = CONFIG.model_copy(update={"linger_s": 600 if orphaned else 0})
    async with serving(tmp_path) as daemon:
        holder = await leased(daemon, config)
        peer = (await connected(daemon)).peer
        while len(daemon.leases) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert await holder.peer.call("bye") == {"last": False}
        if orphaned:
            daemon._starter_gone()
        assert not daemon.is_retired
        peer.tell("observe")


async def test_who_holds_a_lease_learns_that_the_daemon_was_told_to_stop(tmp_path: Path) -> None:
    hanging = Hanging()
    async with serving(tmp_path) as daemon:
        connection = await leased(daemon)
        holder = next(iter(daemon.leases))
        holder.peer.handlers["hang"] = hanging
        calling = asyncio.create_task(connection.peer.call("hang"))
        await hanging.begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await hanging.ended.wait()
        holder.peer.abort()
        with pytest.raises(StackLostError, match="SIGTERM"):
            await calling


async def test_calls_under_way_are_cancelled_when_the_daemon_stops(tmp_path: Path) -> None:
    hanging = Hanging()
    async with serving(tmp_path) as daemon:
        connection = await leased(daemon)
        next(iter(daemon.leases)).peer.handlers["hang"] = hanging
        calling = asyncio.create_task(connection.peer.call("hang"))
        await hanging.begun.wait()
        daemon.retire()
        await hanging.ended.wait()
        calling.cancel()


async def test_a_busy_daemon_refuses_nobody(tmp_path: Path) -> None:
    """Hundreds of processes may join a machine-wide stack while its event loop does something else."""
    async with serving(tmp_path) as daemon:
        _, writer = await asyncio.open_unix_connection(tmp_path / "s.sock")  # so it serves
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(300)]
        try:
            for connection in waiting:
                connection.setblocking(False)
                connection.connect(str(tmp_path / "s.sock"))  # the loop accepts nothing meanwhile
        finally:
            for connection in waiting:
                connection.close()
        async with asyncio.timeout(10):
            for _ in (writer, *waiting):
                await daemon.accepted.acquire()
            writer.close()
            for peer in daemon.peers:
                await peer.lost.wait()
