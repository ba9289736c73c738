"""Both ends of a stack's connection, over a real socket pair."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gymgate.core.errors import (
    ConfigError,
    DataError,
    GymgateError,
    PolicyError,
    ServerDiedError,
    StackLostError,
)
from gymgate.stack.ports import HeldPort, listens
from gymgate.stack.protocol import Peer, Reply
from support.hanging import Hanging


@asynccontextmanager
async def joined(left: Peer, right: Peer) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    for peer, end in zip((left, right), socket.socketpair(), strict=True):
        end.setblocking(False)
        await loop.create_unix_connection(lambda peer=peer: peer, sock=end)
    try:
        yield
    finally:
        for peer in (left, right):
            peer.abort()
        await asyncio.gather(left.lost.wait(), right.lost.wait())


async def test_calls_cross_both_ways_at_once() -> None:
    """An answer may need a call back; a frame may be larger than any buffer."""

    async def double(message: dict[str, Any], _: bytes) -> Any:
        return (
            await left.call("add", a=message["value"], b=message["value"])
            if message["value"]
            else "x" * 5_000_000
        )

    async def add(message: dict[str, Any], _: bytes) -> int:
        return int(message["a"]) + int(message["b"])

    told: list[Any] = []
    left, right = Peer({"double": double}, {"progress": told.append}), Peer({"add": add})
    async with joined(left, right):
        right.tell("progress", message="half")
        answers = await asyncio.gather(*(right.call("double", value=value) for value in range(50)))
    assert len(answers[0]) == 5_000_000
    assert answers[1:] == [2 * value for value in range(1, 50)]
    assert told == [{"message": "half"}]


async def test_errors_cross_with_their_attributes() -> None:
    async def fail(message: dict[str, Any], _: bytes) -> None:
        raise ConfigError("no such thing") if message["known"] else ZeroDivisionError("oh")

    left, right = Peer({"fail": fail}), Peer()
    async with joined(left, right):
        with pytest.raises(ConfigError, match="no such thing"):
            await right.call("fail", known=True)
        with pytest.raises(GymgateError, match="ZeroDivisionError: oh"):
            await right.call("fail", known=False)
        with pytest.raises(DataError, match="JSON"):
            await right.call("fail", known=object())


async def test_an_error_that_cannot_be_sent_as_it_is_keeps_its_message() -> None:
    async def fail(message: dict[str, Any], _: bytes) -> None:
        raise ServerDiedError("it died", server="s", log_tail=object())

    left, right = Peer({"fail": fail}), Peer()
    async with joined(left, right):
        with pytest.raises(GymgateError, match="it died"):
            await right.call("fail")


async def test_a_call_that_waits_to_be_sent_ends_with_the_connection() -> None:
    left, right = Peer(), Peer(describe_loss=lambda: "it left")
    async with joined(left, right), asyncio.timeout(30):
        right.pause_writing()
        call = asyncio.create_task(right.call("hang"))
        await asyncio.sleep(0)
        left.abort()
        with pytest.raises(StackLostError, match="it left"):
            await call


async def test_cancelling_a_call_cancels_the_work() -> None:
    hanging = Hanging()
    left, right = Peer({"hang": hanging}), Peer()
    async with joined(left, right):
        call = asyncio.create_task(right.call("hang"))
        await hanging.begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await hanging.ended.wait()


async def test_losing_the_other_end_ends_calls_and_work() -> None:
    left, right = Peer(), Peer(describe_loss=lambda: "it left")
    left.handlers["hang"] = hanging = Hanging(left.abort)
    async with joined(left, right):
        with pytest.raises(StackLostError, match="it left"):
            await right.call("hang")
        await hanging.ended.wait()
        with pytest.raises(StackLostError, match="it left"):
            await right.call("hang")
        right.tell("progress")


@pytest.mark.parametrize("sent", [b"HTTP/1.1 400", b"\x02\0\0\0\0\0\0\0[]", b"\x01\0\0\0\0\0\0\0{"])
async def test_what_is_no_frame_ends_the_connection_and_is_not_kept(sent: bytes) -> None:
    """Nor is the beginning of a frame whose end never came."""
    left, right = Peer(), Peer()
    async with joined(left, right), asyncio.timeout(30):
        right._send((sent,))
        right.close()
        await left.lost.wait()
        assert not left._buffer


async def test_a_held_port_is_listened_on_by_another_and_given_to_nobody_else() -> None:
    held = HeldPort()
    server = socket.socket()
    try:
        assert not await listens(os.getpid(), held.number)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", held.number))
        server.listen()
        assert await listens(os.getpid(), held.number)
        assert not await listens(1, held.number)
        taken = set()
        for _ in range(50):
            with socket.create_server(("127.0.0.1", 0)) as other:
                taken.add(other.getsockname()[1])
        assert held.number not in taken
    finally:
        server.close()
        held.close()


class Mute(Exception):
    """One that cannot even be described."""

    def __str__(self) -> str:
        raise RuntimeError("nothing to say")


async def test_whatever_a_handler_does_its_call_is_answered_and_others_go_on() -> None:
    outcomes: dict[str, Any] = {
        "half a character": {"x": "\ud83d"},
        "integer keys": {1: 2**70},
        "an object": {"x": object()},
        "CancelledError": asyncio.CancelledError(),
        "GeneratorExit": GeneratorExit(),
        "mute": Mute(),
        "an attribute that is no JSON": PolicyError("bad", status_code=object()),
        "half a character in an error": ConfigError("\ud83d"),
    }

    async def odd(message: dict[str, Any], _: bytes) -> Any:
        outcome = outcomes[message["name"]]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def patient(message: dict[str, Any], body: bytes) -> Reply:
        await gate.wait()
        return Reply(message, body)

    gate = asyncio.Event()
    left, right = Peer({"odd": odd, "patient": patient}), Peer()
    async with joined(left, right), asyncio.timeout(10):
        waiting = asyncio.create_task(right.exchange("patient", {"n": 1}, b"\xff\x00"))
        found = {}
        for name in outcomes:
            try:
                found[name] = await right.call("odd", name=name)
            except GymgateError as error:
                found[name] = type(error)
        gate.set()
        assert await waiting == ({"n": 1}, b"\xff\x00")
    assert found == {
        "half a character": {"x": "\ufffd"},
        "integer keys": {"1": 2.0**70},
        "an object": DataError,
        "CancelledError": GymgateError,
        "GeneratorExit": GymgateError,
        "mute": GymgateError,
        "an attribute that is no JSON": GymgateError,
        "half a character in an error": ConfigError,
    }


async def test_answers_wait_while_the_other_end_does_not_read() -> None:
    """A process that is busy elsewhere does not make its daemon grow."""
    size, calls = 1 << 20, 20

    async def answer(_: dict[str, Any], __: bytes) -> Reply:
        return Reply(None, b"x" * size)

    left, right = Peer({"answer": answer}), Peer()
    async with joined(left, right), asyncio.timeout(30):
        assert right._transport is not None
        assert left._transport is not None
        right._transport.pause_reading()
        running = [asyncio.create_task(right.call("answer")) for _ in range(calls)]
        while len(left.tasks) < calls - 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert left._transport.get_write_buffer_size() < 3 * size
        right._transport.resume_reading()
        await asyncio.gather(*running)
