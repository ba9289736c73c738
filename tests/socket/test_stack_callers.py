"""Callers of a served stack, without a NeMo Gym behind it: what of theirs reaches the daemon, and what ends a connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, StackConfig, StackServer
from gymgate.core.errors import ConfigError, DataError, GymgateError, StackLostError
from gymgate.stack import network, stack_server
from gymgate.stack.client import Lease
from gymgate.stack.network import connect_to, notice_silence
from gymgate.stack.protocol import PROTOCOL, Peer
from gymgate.stack.wire import endpoint_to_wire
from support.served import TOKEN, Served

ROW = b'{"responses_create_params":{"input":"hi"}}'


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served()

    async def connect(config: StackConfig, **_: Any) -> Served:
        return served

    monkeypatch.setattr(stack_server, "connect", connect)
    monkeypatch.setenv("STACK_TOKEN", TOKEN)
    return served


@asynccontextmanager
async def serving(config: StackConfig) -> AsyncIterator[tuple[StackServer, asyncio.Task[None]]]:
    ready = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = StackServer(f"gymgate://127.0.0.1:{listener.getsockname()[1]}")
        work = asyncio.create_task(stack_server.serve_stack(config, listener, TOKEN, None, ready.set, print))
        await ready.wait()
        try:
            yield server, work
        finally:
            work.cancel()
            await asyncio.wait([work])


@asynccontextmanager
async def leased(server: StackServer, *environments: str) -> AsyncIterator[Lease]:
    lease, _ = await connect_to(server)
    try:
        await lease.hello(StackConfig(environments=environments))
        yield lease
    finally:
        await lease.goodbye()


@asynccontextmanager
async def stranger(server: StackServer) -> AsyncIterator[Peer]:
    """A connection that has said nothing yet."""
    peer = Peer()
    port = int(server.url.rpartition(":")[2])
    await asyncio.get_running_loop().create_connection(lambda: peer, "127.0.0.1", port)
    try:
        yield peer
    finally:
        peer.abort()


def message(**fields: Any) -> dict[str, Any]:
    policy = endpoint_to_wire(HTTPEndpoint(base_url="http://127.0.0.1:9/v1", model="policy"))
    unsaid = {"judge_policy": None, "environment": None, "agent": None, "record_bodies": False}
    return {"policy": policy, **unsaid, "limits": {"timeout_s": 30.0}, "rollout_id": "r", **fields}


@pytest.mark.parametrize(
    ("token", "host", "reason"),
    [
        ("x", "127.0.0.1", "16"),
        ("two\nlines of a token", "127.0.0.1", "printable"),
        (TOKEN, "0.0.0.0", "TLS"),
    ],
)
async def test_what_anybody_could_use_is_not_served(
    token: str, host: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(config: StackConfig, **_: Any) -> Served:
        raise AssertionError("it was started")

    monkeypatch.setattr(stack_server, "connect", connect)
    with socket.create_server((host, 0)) as listener, pytest.raises(ConfigError, match=reason):
        await stack_server.serve_stack(Served.config, listener, token, None, lambda: None, print)


@pytest.mark.parametrize("token", ["", "x", TOKEN[:-1], TOKEN + "x", "\udcff" * 20, "y" * 5000])
async def test_nothing_but_the_whole_token_opens_a_stack(stack: Served, token: str) -> None:
    """A wrong proof is answered once, and ends the connection; there is no second try."""
    soon = network.HANDSHAKE_S / 2
    async with serving(stack.config) as (server, _), stranger(server) as peer, asyncio.timeout(soon):
        nonce = await peer.call("enter", nonce="n")
        wrong = network.proof(token.replace("\udcff", "?"), "caller", "n", nonce)
        with pytest.raises(ConfigError):
            await peer.call("prove", proof=wrong)
        await peer.lost.wait()


async def test_a_proof_is_good_for_one_connection_and_one_end(stack: Served) -> None:
    """What a caller or the server once said opens nothing, nor does a call before the proof."""
    async with serving(stack.config) as (server, _), asyncio.timeout(30):
        async with stranger(server) as peer:
            nonce = await peer.call("enter", nonce="n")
            assert await peer.call("enter", nonce="other") == nonce
        for method in ("hello", "run", "status", "bye", "none"):
            async with stranger(server) as peer:
                await peer.call("enter", nonce="n")
                with pytest.raises(GymgateError):
                    await peer.call(method)
        async with stranger(server) as peer:
            nonce = await peer.call("enter", nonce="n")
            good = network.proof(TOKEN, "caller", "n", nonce)
            answer = await peer.call("prove", proof=good)
            assert network.proves(answer, TOKEN, "server", "n", nonce)
        for said in (good, answer, None, [], "", network.proof(TOKEN, "server", "n", nonce)):
            async with stranger(server) as peer:
                await peer.call("enter", nonce="n")
                with pytest.raises(ConfigError):
                    await peer.call("prove", proof=said)
        async with stranger(server) as peer:
            with pytest.raises(ConfigError):
                await peer.call("prove", proof=network.proof(TOKEN, "caller", None, None))


async def test_another_protocol_and_other_settings_are_refused(stack: Served) -> None:
    refused: list[tuple[int, dict[str, Any], type[GymgateError]]] = [
        (PROTOCOL + 1, {"environments": ["one"]}, StackLostError),
        (PROTOCOL, {"environments": ["one"], "linger_s": 5}, ConfigError),
        (PROTOCOL, {"environments": ["three"]}, ConfigError),
    ]
    async with serving(stack.config) as (server, _):
        for protocol, config, kind in refused:
            lease, _ = await connect_to(server)
            with pytest.raises(kind):
                await lease.peer.call("hello", protocol=protocol, config=config)
            await lease.goodbye()


@pytest.mark.parametrize("row", [b"[]", b"{}", b'{"responses_create_params":{}}', b"{"])
async def test_a_row_that_no_agent_can_take_goes_no_further(stack: Served, row: bytes) -> None:
    async with serving(stack.config) as (server, _), leased(server, "one") as lease:
        with pytest.raises(DataError):
            await lease.peer.exchange("run", message(), row)
    assert stack.passed == []


@pytest.mark.parametrize("name", ["policy", "judge_policy"])
async def test_a_callers_endpoint_gets_no_variable_of_the_server(stack: Served, name: str) -> None:
    endpoint = {"type": "http", "base_url": "http://127.0.0.1:9/v1", "api_key_env": "STACK_TOKEN"}
    async with serving(stack.config) as (server, _), leased(server, "one") as lease:
        with pytest.raises(ConfigError, match="api_key_env"):
            await lease.peer.exchange("run", message(**{name: endpoint}), ROW)
    assert stack.passed == []


@pytest.mark.parametrize(
    ("asked", "named", "environment"),
    [(("one",), None, "one"), (("one",), "two", "two"), (("one", "two"), None, None)],
)
async def test_rows_go_to_the_only_environment_that_was_asked_for(
    stack: Served, asked: tuple[str, ...], named: str | None, environment: str | None
) -> None:
    """Else the row's agent decides, among all that are served."""
    async with serving(stack.config) as (server, _), leased(server, *asked) as lease:
        reply = await lease.peer.exchange("run", message(environment=named), ROW)
    assert reply.body == ROW
    assert stack.passed[0]["environment"] == environment


async def test_a_callers_judge_is_its_own(stack: Served) -> None:
    judge = endpoint_to_wire(HTTPEndpoint(base_url="http://127.0.0.1:9/v1", model="judge"))
    async with serving(stack.config) as (server, _), leased(server, "one") as lease:
        await lease.peer.exchange("run", message(judge_policy=judge), ROW)
    (passed,) = stack.passed
    assert [passed[name]["model"] for name in ("policy", "judge_policy")] == ["policy", "judge"]


async def test_callers_lose_their_connection_when_the_server_stops(stack: Served) -> None:
    async with serving(stack.config) as (server, work), leased(server, "one") as lease, asyncio.timeout(30):
        work.cancel()
        await lease.peer.lost.wait()
        with pytest.raises(StackLostError):
            await lease.peer.call("status")


async def test_a_connection_may_take_its_time_once_it_has_the_token(
    stack: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "HANDSHAKE_S", 0.2)
    loop = asyncio.get_running_loop()
    async with serving(stack.config) as (server, _), leased(server, "one") as lease:
        until = loop.time() + 0.5
        while loop.time() < until:
            await lease.peer.call("status")


async def test_a_silent_caller_is_dropped(stack: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_server, "HANDSHAKE_S", 0.2)
    async with serving(stack.config) as (server, _), stranger(server) as peer, asyncio.timeout(30):
        await peer.lost.wait()


async def test_a_first_frame_that_is_too_long_is_not_waited_for(stack: Served) -> None:
    """It would be kept in memory for as long as a handshake may take."""
    async with serving(stack.config) as (server, _), asyncio.timeout(network.HANDSHAKE_S / 2):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(struct.pack("<II", network.MAX_HANDSHAKE, 1))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_token_is_sent_to_no_other_machine_in_the_clear(
    stack: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read())
        writer.close()

    monkeypatch.setattr(network, "is_loopback", lambda address: False)
    async with await asyncio.start_server(listen, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(ConfigError, match="gymgates://"):
            await connect_to(StackServer(f"gymgate://127.0.0.1:{port}"))
        async with asyncio.timeout(30):
            while not received:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert received == [b""]


@pytest.mark.parametrize("environment", ["one", EnvironmentConfig(name="one", overrides={"a.b": 1})])
async def test_settings_of_an_environment_are_the_servers(stack: Served, environment: Any) -> None:
    asked = StackConfig(environments=(environment,))
    if environment == "one":
        network.refuse_settings(asked)
        return
    with pytest.raises(ConfigError, match="overrides"):
        network.refuse_settings(asked)


def test_a_machine_that_vanished_is_noticed_within_a_minute() -> None:
    """And one whose network is slow for less is not."""
    with socket.socket() as sock:
        notice_silence(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        idle, every, count = (
            sock.getsockopt(socket.IPPROTO_TCP, name)
            for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert 5 <= idle + every * count <= 60


async def test_of_a_caller_that_is_let_in_it_is_noticed(
    stack: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[int] = []

    def notice(sock: socket.socket) -> None:
        notice_silence(sock)
        watched.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))

    monkeypatch.setattr(stack_server, "notice_silence", notice)
    async with serving(stack.config) as (server, _), leased(server, "one"):
        assert watched == [60_000]
