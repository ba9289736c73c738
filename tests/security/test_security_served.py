"""Strangers and hostile callers of a served stack, and hostile servers: what one message, or many connections, can cost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gymgate.core import codec
from gymgate.core.config import HTTPEndpoint, RolloutLimits, StackConfig, StackServer
from gymgate.core.errors import ConfigError, DataError, GymgateError, StackLostError
from gymgate.stack import connect, protocol, stack_server
from gymgate.stack.client import Lease
from gymgate.stack.network import connect_to
from gymgate.stack.protocol import Peer, _frame
from gymgate.stack.wire import endpoint_to_wire
from support.served import TOKEN, Process, Served, serving_process

MESSAGE_MB, MESSAGE_S = 200, 1.0
"""What one message from outside may cost its reader."""
VALUES = 20_000_000
ONE = StackConfig(environments=("one",))
ROW = b'{"responses_create_params":{"input":"hi"}}'


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACK_TOKEN", TOKEN)


@pytest.fixture
def process() -> Iterator[Process]:
    with serving_process() as process:
        yield process


@asynccontextmanager
async def leased(server: StackServer) -> AsyncIterator[Lease]:
    lease, _ = await connect_to(server)
    try:
        await lease.hello(ONE)
        yield lease
    finally:
        await lease.goodbye()


def message(**fields: Any) -> dict[str, Any]:
    policy = endpoint_to_wire(HTTPEndpoint(base_url="http://127.0.0.1:9/v1", model="policy"))
    unsaid = {"judge_policy": None, "environment": None, "agent": None, "record_bodies": False}
    return {"policy": policy, **unsaid, "limits": {"timeout_s": 30.0}, "rollout_id": "r", **fields}


def many_values() -> bytes:
    return b'{"responses_create_params":{"input":[' + b"{}," * (VALUES - 1) + b"{}]}}"


async def ended(reader: asyncio.StreamReader) -> None:
    """Return when the other end has closed the connection."""
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass


@contextlib.contextmanager
def costing_little(process: Process) -> Iterator[None]:
    before_mb, before_s = process.peak_mb(), process.cpu_s()
    yield
    assert process.peak_mb() - before_mb < MESSAGE_MB
    assert process.cpu_s() - before_s < MESSAGE_S


async def test_a_row_of_many_values_costs_little(process: Process) -> None:
    """It fails its own rollout, and nothing else of its caller."""
    async with leased(process.server) as lease:
        with costing_little(process):
            with pytest.raises(DataError, match="values"):
                await lease.peer.exchange("run", message(), many_values())
            assert (await lease.peer.call("status"))["rollouts"] == 0


@pytest.mark.parametrize("known", [True, False])
async def test_a_head_of_many_values_costs_little(process: Process, known: bool) -> None:
    """Of a call that exists, and of one that does not. A bystander is answered."""
    head = b'{"id":99,"call":"%s","with":' % (b"run" if known else b"none") + many_values() + b"}"
    async with leased(process.server) as bystander, leased(process.server) as lease:
        with costing_little(process):
            lease.peer._send((struct.pack("<II", len(head), 0), head))
            async with asyncio.timeout(60):
                await lease.peer.lost.wait()
            assert (await bystander.peer.call("status"))["rollouts"] == 0


@pytest.mark.parametrize("accepted", [False, True])
async def test_strangers_fill_no_memory(process: Process, accepted: bool) -> None:
    """Each announces a large frame, and sends as much of it as is read; nor do callers that never say hello."""
    with costing_little(process):
        for _ in range(12):
            if accepted:
                lease, _ = await connect_to(process.server)
                lease.peer._send((struct.pack("<II", 100, 100 << 20), b"x" * (40 << 20)))
                async with asyncio.timeout(60):
                    await lease.peer.lost.wait()
                continue
            reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
            writer.write(struct.pack("<II", 100, 100 << 20))
            with contextlib.suppress(ConnectionError):
                for _ in range(40):
                    writer.write(b"x" * (1 << 20))
                    await writer.drain()
            await ended(reader)
            writer.transport.abort()


UNREAD_S = 3.0


@pytest.mark.parametrize("method", ["enter", "x" * 60_000])
async def test_a_stranger_cannot_ask_and_ask(process: Process, method: str) -> None:
    """Before the proof two messages may come. Answers that nobody reads would fill the memory."""
    with costing_little(process):
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", process.port, limit=1 << 10)
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(UNREAD_S):
                    for number in range(1, 1 << 20):
                        writer.write(b"".join(_frame({"id": number, "call": method, "with": {}})))
                        await writer.drain()
                raise AssertionError("the server reads on")
            await ended(reader)
            writer.transport.abort()


async def test_a_caller_that_reads_no_answers_gets_no_more(process: Process) -> None:
    """Its calls wait, so that their answers fill no memory. It is answered once it reads."""
    async with leased(process.server) as bystander, leased(process.server) as lease:
        with costing_little(process):
            transport = lease.peer._transport
            assert transport is not None
            transport.pause_reading()
            frames = b"".join(
                b"".join(_frame({"id": number, "call": "x" * 60_000, "with": {}}))
                for number in range(10_000, 12_000)
            )
            transport.set_write_buffer_limits(0)
            transport.write(frames)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(UNREAD_S):
                    await lease.peer._writable.wait()
            async with asyncio.timeout(30):
                assert (await bystander.peer.call("status"))["rollouts"] == 0
        transport.resume_reading()
        async with asyncio.timeout(30):
            assert (await lease.peer.call("status"))["rollouts"] == 0


async def test_connections_that_ended_leave_no_memory(process: Process) -> None:
    """One after another, each in the middle of a frame."""
    before = process.peak_mb()
    for _ in range(6):
        async with leased(process.server) as lease:
            lease.peer._send((struct.pack("<II", 100, 100 << 20), b"x" * (60 << 20)))
            assert lease.peer._transport is not None
            lease.peer._transport.set_write_buffer_limits(0)
            async with asyncio.timeout(60):
                await lease.peer._writable.wait()
    assert process.peak_mb() - before < MESSAGE_MB


async def test_a_frame_without_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that keep coming do not prolong it."""
    monkeypatch.setattr(protocol, "FRAME_S", 0.2)
    stranger, peer = Peer(), Peer(max_frame=1 << 20)
    loop = asyncio.get_running_loop()
    for end, sock in zip((stranger, peer), socket.socketpair(), strict=True):
        await loop.create_unix_connection(lambda end=end: end, sock=sock)
    stranger._send((struct.pack("<II", 100, 100),))
    async with asyncio.timeout(30):
        while not peer.lost.is_set():
            stranger._send((b"x",))
            await asyncio.wait([asyncio.ensure_future(peer.lost.wait())], timeout=0.02)


async def test_silent_strangers_shut_nobody_out(tmp_path: Path) -> None:
    """With 128 files for the server, and 300 connections that never say anything."""
    with contextlib.ExitStack() as exits:
        process = exits.enter_context(
            serving_process("prlimit", "--nofile=128:128", errors=tmp_path / "errors")
        )
        for _ in range(300):
            exits.enter_context(socket.create_connection(("127.0.0.1", process.port)))
        for _ in range(3):
            async with asyncio.timeout(5), leased(process.server) as lease:
                assert (await lease.peer.exchange("run", message(), ROW)).body == ROW
    assert "cannot accept" not in (tmp_path / "errors").read_text()


MALFORMED = [
    b"[]",
    b"null",
    b"{",
    b"{}",
    b'{"call":1}',
    b'{"id":"x","call":"run","with":{}}',
    b'{"id":[],"call":"run","with":{}}',
    b'{"id":7,"call":[],"with":{}}',
    b'{"id":7,"call":"run"}',
    b'{"id":7,"call":"run","with":[]}',
    b'{"id":7,"call":"run","with":{}}',
    b'{"id":7,"call":"hello","with":{}}',
    b'{"id":7,"call":"hello","with":{"protocol":[],"config":[]}}',
    b'{"id":7,"call":"none","with":{}}',
    b'{"cancel":[]}',
    b'{"tell":[],"with":{}}',
    b'{"tell":"ping"}',
    b'{"tell":"ping","with":[]}',
]


@pytest.mark.parametrize("head", MALFORMED)
async def test_a_malformed_frame_is_answered_or_ends_the_connection(
    process: Process, tmp_path: Path, head: bytes
) -> None:
    """Without a traceback, of a caller that has the token."""
    with serving_process(errors=tmp_path / "errors") as process:
        async with leased(process.server) as lease:
            answer = asyncio.ensure_future(lease.peer.lost.wait())
            pending: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            lease.peer._pending[7] = pending
            lease.peer._send((struct.pack("<II", len(head), 0), head))
            told = asyncio.ensure_future(lease.peer.exchange("status", {}))
            await asyncio.wait([answer, pending, told], return_when=asyncio.FIRST_COMPLETED, timeout=30)
            assert lease.peer.lost.is_set() or pending.done() or told.done()
            if pending.done():
                assert isinstance(pending.exception(), GymgateError)
            with contextlib.suppress(StackLostError):
                await told
            answer.cancel()
        async with leased(process.server) as lease:
            assert (await lease.peer.call("status"))["rollouts"] == 0
    assert "Traceback" not in (tmp_path / "errors").read_text()


@asynccontextmanager
async def listening(*says: bytes) -> AsyncIterator[tuple[StackServer, bytearray]]:
    """Another program at a stack's address. It answers each thing it hears with the next that it has to say."""
    heard = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = iter(says)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                heard.extend(data)
                if (say := next(left, None)) is None:
                    break
                writer.write(say)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield StackServer(f"gymgate://127.0.0.1:{listener.sockets[0].getsockname()[1]}"), heard


def answer(number: int, value: Any) -> bytes:
    """The frame that answers a call, whatever it is."""
    return b"".join(_frame({"id": number, "ok": value}))


STACK = {"agents": {}, "gateway_url": "", "pid": None}
HOSTILE = {
    "HTTP": (b"HTTP/1.1 400 Bad Request\r\n\r\n",),
    "an older server": (b"accepted\n",),
    "silence": (),
    "a wrong proof": (answer(1, "x" * 64), answer(2, "x" * 64), answer(3, STACK)),
    "an empty proof": (answer(1, "x" * 64), answer(2, ""), answer(3, STACK)),
    "other types": (answer(1, ["x"]), answer(2, {"x": 1}), answer(3, STACK)),
    "nothing": (answer(1, None), answer(2, None), answer(3, STACK)),
    "no JSON": (struct.pack("<II", 10, 0) + b"not a json",),
    "an error that is none": (b"".join(_frame({"id": 1, "error": []})),),
    "an error without a text": (b"".join(_frame({"id": 1, "error": {"error": "ServerDiedError"}})),),
    "a call": (b"".join(_frame({"id": 1, "call": "policy", "with": {}})), answer(1, "x"), answer(2, "x")),
}


@pytest.mark.parametrize("says", HOSTILE.values(), ids=HOSTILE)
async def test_who_does_not_know_the_token_learns_nothing_and_gets_no_rollouts(
    says: tuple[bytes, ...],
) -> None:
    """As another user who listens at the port of a server that is down; whatever it answers, the error is typed."""
    async with listening(*says) as (server, heard), asyncio.timeout(60):
        with pytest.raises(GymgateError):
            await connect(ONE, where=server)
    assert TOKEN.encode() not in heard
    assert b"hello" not in heard


@pytest.mark.parametrize("described", [None, [], {}, {**STACK, "agents": 5}, {**STACK, "agents": {"a": 5}}])
async def test_a_server_that_describes_no_stack_is_a_lost_stack(
    described: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has the token."""

    async def hello(caller: Any, message: dict[str, Any], _: bytes) -> Any:
        return described

    monkeypatch.setattr(stack_server._Caller, "_hello", hello)
    async with in_process(Served(), monkeypatch) as server:
        with pytest.raises(StackLostError):
            await connect(ONE, where=server)


async def test_a_callers_memory_is_not_a_strangers_to_fill() -> None:
    """It gives up before the frame is there."""
    said = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = 0
        with contextlib.suppress(ConnectionError):
            writer.write(struct.pack("<II", 100, 1500 << 20))
            while sent < 200:
                writer.write(b"x" * (1 << 20))
                await writer.drain()
                sent += 1
        assert sent < 50
        said.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener, asyncio.timeout(60):
        server = StackServer(f"gymgate://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        with pytest.raises(StackLostError):
            await connect(ONE, where=server)
        await said.wait()


RECORDS = [
    b"",
    b"[]",
    b"{",
    b'{"calls":[{}],"requests":[]}',
    b'{"calls":{},"requests":{},"timing":7}',
    b"null",
]


@pytest.mark.parametrize("record", RECORDS)
async def test_a_record_that_is_none_is_a_lost_stack(record: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a server that has the token."""
    served = Served()

    async def forward(message: dict[str, Any], row: bytes) -> protocol.Reply:
        return protocol.Reply(None, record)

    monkeypatch.setattr(served, "forward", forward)
    async with in_process(served, monkeypatch) as server:
        stack = await connect(ONE, where=server)
        try:
            with pytest.raises(StackLostError):
                await stack.run(
                    codec.loads(ROW),
                    policy=HTTPEndpoint(base_url="http://127.0.0.1:9/v1", model="m"),
                    limits=RolloutLimits(timeout_s=20),
                )
        finally:
            await stack.close()


@asynccontextmanager
async def in_process(served: Served, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StackServer]:
    async def take(config: StackConfig, **_: Any) -> Served:
        return served

    monkeypatch.setattr(stack_server, "connect", take)
    ready = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = StackServer(f"gymgate://127.0.0.1:{listener.getsockname()[1]}")
        work = asyncio.create_task(
            stack_server.serve_stack(served.config, listener, TOKEN, None, ready.set, print)
        )
        await ready.wait()
        try:
            yield server
        finally:
            work.cancel()
            await asyncio.wait([work])


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "0.0.0.0", "[::ffff:127.0.0.1]", "2130706433"]
)
@pytest.mark.parametrize("name", ["policy", "judge_policy"])
async def test_a_callers_policy_is_no_server_of_the_stack(
    host: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it could speak as another caller's agent. Every other port of the machine is fine."""
    served = Served()
    served.ports = [4321]

    def endpoint(port: int, **fields: Any) -> dict[str, Any] | str:
        return endpoint_to_wire(HTTPEndpoint(base_url=f"http://{host}:{port}/v1", model="m", **fields))

    async with in_process(served, monkeypatch) as server, leased(server) as lease:
        replicated = endpoint(9, replicas=(f"http://{host}:4321/v1",))
        for wrong in (endpoint(4321), endpoint(int(server.url.rpartition(":")[2])), replicated):
            with pytest.raises(ConfigError):
                await lease.peer.exchange("run", message(**{name: wrong}), ROW)
        assert served.passed == []
        await lease.peer.exchange("run", message(**{name: endpoint(9)}), ROW)
    assert len(served.passed) == 1
