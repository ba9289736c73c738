"""A machine that vanishes ends a request in seconds, although its connections stay open. A slow process does not."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import uvloop

from gymgate.core import http_client
from gymgate.core.http_client import DroppedError, HTTPClient, Request, UnreachableError
from support.hostile_server import WAIT_S, Peer, hostile
from support.vanishing import vanish

loops = pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


@pytest.fixture(autouse=True)
def another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback stands for another machine, which has vanished after 5 s."""
    monkeypatch.setattr(http_client, "is_loopback", lambda host: False)
    monkeypatch.setattr(http_client, "VANISHED_S", 5)


@loops
def test_a_machine_that_vanishes_before_it_answers_costs_seconds(loop: Any) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        vanish(peer.connection)
        end.wait(WAIT_S)

    async def scene() -> None:
        async with HTTPClient() as client, asyncio.timeout(20):
            with pytest.raises(DroppedError):
                await client.send(Request(server.url), b"question")

    end = threading.Event()
    with asyncio.Runner(loop_factory=loop) as runner, hostile(script) as server:
        try:
            runner.run(scene())
        finally:
            end.set()


@loops
@pytest.mark.parametrize("size", [10, 20_000_000], ids=["small", "larger than the kernel's buffers"])
def test_a_machine_that_vanishes_between_two_requests_costs_seconds(loop: Any, size: int) -> None:
    """The kernel sends the second request again and again. Keepalive does not begin before it is acknowledged."""

    def script(peer: Peer) -> None:
        peer.answer(peer.request())
        end.wait(WAIT_S)

    async def scene() -> None:
        async with HTTPClient() as client, asyncio.timeout(20):
            request = Request(server.url)
            await client.send(request, b"first")
            (connection,) = server.open
            vanish(connection)
            with pytest.raises(DroppedError):
                await client.send(request, b"x" * size)

    end = threading.Event()
    with asyncio.Runner(loop_factory=loop) as runner, hostile(script) as server:
        try:
            runner.run(scene())
        finally:
            end.set()


async def test_a_machine_that_has_vanished_is_not_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "CONNECT_TIMEOUT_S", 0.5)
    with hostile(Peer.request) as server:
        vanish(server.listener)
        async with HTTPClient() as client, asyncio.timeout(20):
            with pytest.raises(UnreachableError):
                await client.send(Request(server.url), b"question")


@loops
def test_a_process_that_reads_late_is_waited_for(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads only after the client has looked whether it vanished."""
    looked = threading.Event()
    look = http_client._Connection._check_acknowledged

    def observed(connection: http_client._Connection, sent: int) -> None:
        look(connection, sent)
        looked.set()

    def script(peer: Peer) -> None:
        assert looked.wait(WAIT_S)
        peer.answer(b"%d" % len(peer.request()))

    async def scene() -> None:
        async with HTTPClient() as client, asyncio.timeout(WAIT_S):
            assert (await client.send(Request(server.url), b"x" * 5_000_000)).body == b"5000000"

    monkeypatch.setattr(http_client._Connection, "_check_acknowledged", observed)
    with asyncio.Runner(loop_factory=loop) as runner, hostile(script, receive_buffer=4096) as server:
        runner.run(scene())
