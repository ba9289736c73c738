"""An answer never becomes that to another request, whatever the server sends and however busy the event loop is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from gymgate.core import http_client
from gymgate.core.http_client import DroppedError, HTTPClient, Request
from support.hostile_server import WAIT_S, Peer, hostile

ROUNDS = 20
TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
STALE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nstale"

loops = pytest.mark.parametrize(
    "loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


def play(loop: Callable[[], asyncio.AbstractEventLoop], scene: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await scene()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(bounded())


@loops
@pytest.mark.parametrize("unasked", [STALE, TIMEOUT, b"H"], ids=["an answer", "408", "a byte"])
def test_what_waits_on_an_idle_connection_answers_nobody(loop: Any, unasked: bytes) -> None:
    """The event loop is busy, so that nothing has read what the server sent."""
    answered, sent = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        while True:
            peer.answer(peer.request())
            if peer.number % 2 == 0:
                answered.wait(WAIT_S)
                peer.say(unasked)
                sent.set()

    async def scene() -> None:
        for number in range(ROUNDS):
            async with HTTPClient() as client:
                request = Request(server.url)
                answered.clear(), sent.clear()
                first, second = b"first %d" % number, b"second %d" % number
                assert (await client.send(request, first)).body == first
                answered.set()
                assert sent.wait(WAIT_S)
                response = await client.send(request, second)
                assert (response.status, response.body) == (200, second)

    with hostile(script) as server:
        play(loop, scene)
        assert server.connections == 2 * ROUNDS


@loops
def test_an_answer_that_waits_on_a_new_connection_is_refused(
    loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = threading.Event()

    def script(peer: Peer) -> None:
        peer.say(STALE)
        sent.set()
        peer.request()

    dial = http_client._dial

    async def slow_dial(*args: Any) -> None:
        await dial(*args)
        assert sent.wait(WAIT_S)

    async def scene() -> None:
        async with HTTPClient() as client:
            with pytest.raises(DroppedError):
                await client.send(Request(server.url), b"question")

    monkeypatch.setattr(http_client, "_dial", slow_dial)
    with hostile(script) as server:
        play(loop, scene)


@loops
def test_an_answer_sent_before_a_byte_of_the_request_arrived_is_refused(
    loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second answer is sent after the client wrote its second request, and before the server could get any of it."""
    monkeypatch.setattr(http_client, "is_loopback", lambda host: False)
    written, end = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        peer.connection.recv(1)
        peer.answer(b"early")  # the rest of the first request fills the server's receive buffer
        written.wait(WAIT_S)
        peer.say(STALE)
        end.wait(WAIT_S)

    async def scene() -> None:
        async with HTTPClient() as client:
            request = Request(server.url)
            assert (await client.send(request, b"x" * 100_000)).body == b"early"
            second = asyncio.create_task(client.send(request, b"question"))
            while not second.done() and not written.is_set():
                await asyncio.sleep(0)
                written.set()
            with pytest.raises(DroppedError):
                await second
        end.set()

    with hostile(script, receive_buffer=4096) as server:
        play(loop, scene)


@loops
@pytest.mark.parametrize("in_one_packet", [True, False])
def test_a_server_that_sent_too_much_gets_a_connection_for_each_request(
    loop: Any, in_one_packet: bool
) -> None:
    """Nobody can tell an answer too many from the answer to a request that was sent just before it."""

    def script(peer: Peer) -> None:
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d"
        peer.request()
        if in_one_packet:
            peer.say(answer % 1 + answer % 2)
        else:
            peer.say(answer % 1)
            peer.request()
            peer.say(answer % 2)
            peer.say(answer % 3)
        while True:
            peer.request()
            peer.say(answer % 4)

    async def scene() -> None:
        async with HTTPClient() as client:
            request = Request(server.url)
            for _ in range(1 if in_one_packet else 2):
                await client.send(request)
            while not client._untrusted:  # noqa: ASYNC110 the connection has more to read
                await asyncio.sleep(0)
            for _ in range(5):
                assert (await client.send(request)).body == b"1"
                assert not client._idle.get(request.address)

    with hostile(script) as server:
        play(loop, scene)
        assert server.connections == 6


@loops
def test_a_server_that_sent_too_much_loses_its_other_connections(loop: Any) -> None:
    asked = threading.Barrier(2)
    answered, closed = threading.Event(), threading.Event()

    def script(peer: Peer) -> None:
        body = peer.request()
        asked.wait(WAIT_S)
        peer.answer(body)
        if body == b"mixed up":
            assert answered.wait(WAIT_S)
            peer.say(STALE)
        else:
            with pytest.raises(ConnectionError):
                peer.request()
            closed.set()

    async def scene() -> None:
        async with HTTPClient() as client:
            request = Request(server.url)
            await asyncio.gather(*(client.send(request, body) for body in (b"mixed up", b"other")))
            answered.set()
            assert await asyncio.to_thread(closed.wait, WAIT_S)

    with hostile(script) as server:
        play(loop, scene)


@loops
def test_the_rest_of_a_request_that_was_answered_early_is_not_sent_before_the_next(loop: Any) -> None:
    """The server takes it for another request."""
    answered = threading.Event()

    def script(peer: Peer) -> None:
        if peer.number == 0:
            peer.connection.recv(1)
            peer.answer(b"early")
            assert answered.wait(WAIT_S)
        peer.answer(b"%d" % len(peer.request()))

    async def scene() -> None:
        async with HTTPClient() as client:
            request = Request(server.url)
            assert (await client.send(request, b"x" * 20_000_000)).body == b"early"
            answered.set()
            assert (await client.send(request, b"question")).body == b"8"

    with hostile(script) as server:
        play(loop, scene)
        assert server.connections == 2


@loops
def test_a_timeout_of_an_idle_connection_costs_no_trust(loop: Any) -> None:
    """A load balancer says 408 before it closes; the next connection is used again as any other."""
    answered = threading.Event()

    def script(peer: Peer) -> None:
        peer.answer(peer.request())
        if peer.number == 0:
            answered.wait(WAIT_S)
            peer.say(TIMEOUT)
            return
        while True:
            peer.answer(peer.request())

    async def scene() -> None:
        async with HTTPClient() as client:
            request = Request(server.url)
            await client.send(request, b"one")
            answered.set()
            [idle] = client._open
            while not idle._lost:  # noqa: ASYNC110 the event loop reads the 408 and the end
                await asyncio.sleep(0)
            for _ in range(3):
                await client.send(request, b"more")

    with hostile(script) as server:
        play(loop, scene)
        assert server.connections == 2
