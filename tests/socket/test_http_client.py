"""The HTTP client against servers that say what a test wants, byte for byte."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gymgate.core import http_client
from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import ConfigError
from gymgate.core.http_client import (
    DroppedError,
    HTTPClient,
    Request,
    Response,
    UnreachableError,
    UnusableBodyError,
    header_lines,
)
from gymgate.gateway.backends.http import HTTPBackend
from support.hostile_server import WAIT_S, Peer, hostile

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Answers each request with the next of `answers`; `b""` closes the connection, `None` says nothing."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Event()
        """A client closed its connection."""
        self.url = ""
        self.tasks: set[asyncio.Task[None] | None] = set()
        self.got_request = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.add(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line[15:])
                        for line in head.split(b"\r\n")
                        if line.lower().startswith(b"content-length:")
                    ),
                    0,
                )
                self.requests.append(head + await reader.readexactly(length))
                self.got_request.set()
                answer = self.answers.pop(0)
                if answer is not None:
                    writer.write(answer)
                if answer == b"" or (answer is not None and b"close" in answer):
                    return
        except asyncio.CancelledError:
            pass  # the test has ended
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        finally:
            writer.close()


@asynccontextmanager
async def serving(*answers: bytes | None, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(*answers)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    port = listener.sockets[0].getsockname()[1]
    server.url = f"http{'s' if tls else ''}://127.0.0.1:{port}"
    try:
        yield server
    finally:
        listener.close()
        for task in server.tasks:
            if task is not None and not task.done():
                task.cancel()
        await asyncio.gather(*filter(None, server.tasks), return_exceptions=True)


@pytest.fixture
async def client() -> AsyncIterator[HTTPClient]:
    async with HTTPClient() as made:
        yield made


@pytest.fixture
async def put_clock_forward(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Put the event loop's clock forward by some seconds. The clock of uvloop cannot be set."""
    ahead_s = 0.0

    def put_forward(by_s: float) -> None:
        nonlocal ahead_s
        ahead_s += by_s

    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + ahead_s)
    return put_forward


async def ask(client: HTTPClient, server: Server, timeout_s: float | None = 5.0) -> Response:
    return await client.send(Request(f"{server.url}/v1/x"), b"{}", timeout_s=timeout_s)


async def test_a_connection_is_used_again(client: HTTPClient) -> None:
    async with serving(OK, OK) as server:
        assert (await ask(client, server)).body == b"ok"
        assert (await ask(client, server)).status == 200
        assert server.connections == 1
        lines = server.requests[0].decode().split("\r\n")
        assert lines[0] == "POST /v1/x HTTP/1.1"
        assert f"Host: {server.url.removeprefix('http://')}" in lines
        assert {"Content-Type: application/json", "Accept-Encoding: identity"} <= set(lines)


async def test_a_connection_that_was_idle_for_too_long_is_closed() -> None:
    async with serving(OK, OK) as server, HTTPClient(keepalive_s=0.02) as client:
        await ask(client, server)
        async with asyncio.timeout(5):
            await server.closed.wait()
        await ask(client, server)
        assert server.connections == 2


async def test_a_connection_that_fell_idle_after_others_is_closed(
    put_clock_forward: Callable[[float], None],
) -> None:
    """It is too young when the client looks first, and no later request makes the client look again."""
    async with serving(OK, OK) as server, HTTPClient(keepalive_s=0.2) as client:
        await ask(client, server)
        put_clock_forward(0.1)
        await ask(client, server)
        async with asyncio.timeout(5):
            await server.closed.wait()


async def test_a_connection_that_was_idle_for_too_long_is_not_used(
    client: HTTPClient, put_clock_forward: Callable[[float], None]
) -> None:
    """A busy event loop has not closed it yet."""
    async with serving(OK, OK) as server:
        await ask(client, server)
        put_clock_forward(http_client.KEEPALIVE_S)
        await ask(client, server)
        assert server.connections == 2


FRAMINGS = {
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\nX-Trailer: 1\r\n\r\n",
    "until the end": b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nok",
    "after a hint": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
    "with more than was asked for": OK + OK,
    "old": b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
}


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_answers_in_every_framing(framing: str, client: HTTPClient) -> None:
    async with serving(FRAMINGS[framing], OK) as server:
        assert (await ask(client, server))[::2] == (200, b"ok")
        assert (await ask(client, server))[::2] == (200, b"ok")
        assert server.connections == (1 if framing in ("chunked", "after a hint") else 2)


async def test_what_comes_unasked_answers_nobody(client: HTTPClient) -> None:
    """An answer that a server sends ahead must not be taken for that to a later request."""
    async with serving(OK, OK) as server:
        request = Request(server.url)
        await client.send(request, timeout_s=5)
        [connection] = client._open
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong")
        assert (await client.send(request, timeout_s=5)).body == b"ok"
        assert server.connections == 2


@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 103 Early Hints\r\nX: %b\r\n\r\n" % (b"x" * 40_000)])
async def test_the_bound_on_headers_holds_within_one_packet(client: HTTPClient, interim: bytes) -> None:
    headers = b"".join(b"X-%d: y\r\n" % number for number in range(4_000 if interim else 8_000))
    async with serving(None) as server:
        asking = asyncio.create_task(ask(client, server))
        async with asyncio.timeout(5):
            await server.got_request.wait()
        [connection] = client._open
        connection.data_received(interim + OK.replace(b"\r\n\r\n", b"\r\n" + headers + b"\r\n"))
        with pytest.raises(DroppedError, match="bytes of headers"):
            await asking


async def test_trailers_are_no_headers(client: HTTPClient) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: 1\r\n\r\n2\r\nok\r\n0\r\n"
    async with serving(chunked + b"Content-Encoding: gzip\r\nX: 2\r\n\r\n") as server:
        response = await ask(client, server)
        assert response.body == b"ok"
        assert response.headers == {"transfer-encoding": "chunked", "x": "1"}


async def test_an_interim_answer_is_not_the_answer(client: HTTPClient) -> None:
    async with serving(b"HTTP/1.1 103 Early Hints\r\nConnection: close\r\n\r\n") as server:
        with pytest.raises(DroppedError):
            await ask(client, server)


BROKEN = {
    "cut": (
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\nConnection: close\r\n\r\nok",
        "before the whole answer",
    ),
    "nothing": (b"", "before the whole answer"),
    "not HTTP": (b"220 mail.example ESMTP close\r\n", "malformed"),
    "endless header": (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000, "bytes of headers"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_answer_is_none(case: str, client: HTTPClient) -> None:
    answer, message = BROKEN[case]
    async with serving(answer) as server:
        with pytest.raises(DroppedError, match=message):
            await ask(client, server)


async def test_an_answer_that_a_reset_cut_is_none(client: HTTPClient) -> None:
    """It has no length: it ends with its connection, but not with a reset."""
    arrived = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.say(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        assert arrived.wait(WAIT_S)
        peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.connection.close()

    with hostile(script) as server:
        asking = asyncio.create_task(client.send(Request(server.url)))
        async with asyncio.timeout(WAIT_S):
            while not any(each._size for each in client._open):  # noqa: ASYNC110 it reads what was said
                await asyncio.sleep(0)
            arrived.set()
            with pytest.raises(DroppedError):
                await asking


X200 = b"x" * 200
BODIES = {
    "with its length": b"Content-Length: 200\r\n\r\n" + X200,
    "in a chunk": b"Transfer-Encoding: chunked\r\n\r\nc8\r\n" + X200 + b"\r\n0\r\n\r\n",
    "in chunks": b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 200 + b"0\r\n\r\n",
    "until the end": b"Connection: close\r\n\r\n" + X200,
}


@pytest.mark.parametrize("framing", BODIES)
async def test_a_body_has_a_bound(framing: str) -> None:
    answer = b"HTTP/1.1 200 OK\r\n" + BODIES[framing]
    async with serving(answer, answer) as server:
        async with HTTPClient(max_body=199) as client:
            with pytest.raises(UnusableBodyError, match="more than 199 bytes"):
                await ask(client, server)
        async with HTTPClient(max_body=200) as client:
            assert (await ask(client, server)).body == X200


async def test_a_body_that_is_said_to_be_too_long_is_not_waited_for() -> None:
    async with (
        serving(b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n") as server,
        HTTPClient(max_body=199) as client,
    ):
        with pytest.raises(UnusableBodyError):
            await ask(client, server)


async def test_silence_times_out_and_closes_the_connection(client: HTTPClient) -> None:
    async with serving(None) as server:
        with pytest.raises(TimeoutError):
            await ask(client, server, timeout_s=0.05)
        async with asyncio.timeout(5):
            await server.closed.wait()


async def test_the_time_to_connect_is_part_of_a_requests_time(
    client: HTTPClient, put_clock_forward: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    dial = http_client._dial

    async def slow_dial(*args: Any) -> None:
        await dial(*args)
        put_clock_forward(20)

    monkeypatch.setattr(http_client, "_dial", slow_dial)
    async with serving(None) as server:
        asking = asyncio.create_task(ask(client, server, timeout_s=1000))
        async with asyncio.timeout(50):
            await server.got_request.wait()
        put_clock_forward(990)
        async with asyncio.timeout(5):
            with pytest.raises(TimeoutError):
                await asking


async def test_a_requests_timeout_does_not_end_the_next_one(
    client: HTTPClient, put_clock_forward: Callable[[float], None]
) -> None:
    past = threading.Event()

    def script(peer: Peer) -> None:
        peer.answer(peer.request())
        question = peer.request()
        assert past.wait(WAIT_S)
        peer.answer(question)

    with hostile(script) as server:
        request = Request(server.url)
        await client.send(request, b"first", timeout_s=1000)
        second = asyncio.create_task(client.send(request, b"second"))
        await asyncio.sleep(0)
        put_clock_forward(1000)
        asyncio.get_running_loop().call_later(0, past.set)  # after whatever else is due
        async with asyncio.timeout(WAIT_S):
            assert (await second).body == b"second"
        assert server.connections == 1


async def test_a_cancelled_request_closes_its_connection(client: HTTPClient) -> None:
    async with serving(None) as server:
        asking = asyncio.create_task(ask(client, server))
        async with asyncio.timeout(5):
            await server.got_request.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await server.closed.wait()


async def test_a_connection_takes_no_longer_than_its_request_may(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dial(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(http_client, "_dial", dial)
    async with HTTPClient() as client, asyncio.timeout(20):
        with pytest.raises(UnreachableError, match=r"0\.05 s"):
            await client.send(Request("http://127.0.0.1:9/"), timeout_s=0.05)


async def test_nobody_listens(client: HTTPClient) -> None:
    async with serving() as server:
        pass
    with pytest.raises(UnreachableError, match="Connection refused"):
        await ask(client, server)


@pytest.mark.parametrize("headers", [{"X": "a\r\nY: b"}, {"X\r\nY": "b"}, {"X": "\0"}, {"a b": "c"}])
def test_headers_cannot_break_a_request(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="header"):
        Request("http://h/", headers)


def test_given_headers_win() -> None:
    head = Request("http://user:word@h:81/a?b=c", {"user-agent": "mine"}).head
    assert head.startswith(b"POST /a?b=c HTTP/1.1\r\n")
    assert b"Host: h:81\r\n" in head
    assert b"mine" in head
    assert b"gymgate" not in head
    assert b"Authorization: Basic dXNlcjp3b3Jk\r\n" in head
    assert header_lines({"X": "ü"}) == "X: ü\r\n".encode()


async def test_a_plain_proxy_is_asked_for_the_whole_url(
    client: HTTPClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(OK) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:secret@"))
        assert (await client.send(Request("http://models.example/v1/x"), timeout_s=5)).body == b"ok"
        assert proxy.requests[0].startswith(
            b"POST http://models.example/v1/x HTTP/1.1\r\nHost: models.example\r\n"
        )
        assert b"Proxy-Authorization: Basic bWU6c2VjcmV0\r\n" in proxy.requests[0]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate and its key, for 127.0.0.1 and models.example."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    names = "subjectAltName=IP:127.0.0.1,DNS:models.example"
    making = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-addext", names]
    subprocess.run(
        [*making, "-keyout", path, "-out", f"{path}.crt", "-days", "2"], check=True, capture_output=True
    )
    with path.open("a") as file:
        file.write(Path(f"{path}.crt").read_text())
    return path


@pytest.fixture
def tls(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """What a server needs whom the client trusts."""
    trusting = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(http_client, "_tls", lambda: trusting)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


async def test_tls(client: HTTPClient, tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(OK, OK, tls=tls) as server:
        assert (await ask(client, server)).body == b"ok"
        assert (await ask(client, server)).body == b"ok"
        assert server.connections == 1
        monkeypatch.setattr(http_client, "_tls", ssl.create_default_context)
        with pytest.raises(UnreachableError, match="certificate") as caught:
            await HTTPClient().send(Request(server.url), timeout_s=5)
        assert not caught.value.retryable


async def test_a_tunnel_through_a_proxy(
    client: HTTPClient, tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    async with serving(OK, OK, tls=tls) as server:

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            port = int(server.url.rpartition(":")[2])
            there_reader, there = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await asyncio.gather(copy(reader, there), copy(there_reader, writer))

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    target.write(data)
            except ConnectionError:
                pass
            finally:
                target.close()

        listener = await asyncio.start_server(proxy, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        monkeypatch.setenv("https_proxy", f"http://me:secret@127.0.0.1:{port}")
        request = Request("https://models.example/v1/x")
        for _ in range(2):
            assert (await client.send(request, timeout_s=5)).body == b"ok"
        assert len(asked) == 1
        assert asked[0].startswith(b"CONNECT models.example:443 HTTP/1.1\r\nHost: models.example:443\r\n")
        assert b"Proxy-Authorization: Basic bWU6c2VjcmV0\r\n" in asked[0]
        assert server.requests[0].startswith(b"POST /v1/x HTTP/1.1\r\nHost: models.example\r\n")
        await client.close()
        listener.close()


@pytest.mark.parametrize(
    ("status", "advice", "passes"),
    [(407, "; .*password", False), (403, "; .*no_proxy", False), (503, "$", True)],
)
async def test_a_proxy_that_refuses(
    status: int, advice: str, passes: bool, client: HTTPClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(b"HTTP/1.1 %d No\r\nContent-Length: 0\r\n\r\n" % status) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url.replace("//", "//me:secret@"))
        with pytest.raises(UnreachableError, match=f"{proxy.url}.* status {status}{advice}") as refused:
            await client.send(Request("https://models.example/"), timeout_s=5)
        assert "secret" not in str(refused.value)
        assert refused.value.retryable is passes  # else nobody is told to wait for it


async def test_a_server_without_tls_is_not_taken_for_its_proxy(
    client: HTTPClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(proxy, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        with pytest.raises(UnreachableError, match=r"^it does not answer in TLS"):
            await client.send(Request("https://models.example/"), timeout_s=5)


async def test_a_proxy_that_does_not_listen_is_named(
    client: HTTPClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as proxy:
        pass
    monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//me:secret@"))
    with pytest.raises(UnreachableError, match=f"{proxy.url}.*Connection refused") as refused:
        await client.send(Request("http://models.example/"), timeout_s=5)
    assert "secret" not in str(refused.value)


async def test_a_name_that_no_host_can_have_is_unreachable(client: HTTPClient) -> None:
    for host in ("a..b", "a" * 64 + ".example"):
        with pytest.raises(UnreachableError):
            await client.send(Request(f"http://{host}/"), timeout_s=5)


async def with_client(scene: Callable[..., Awaitable[None]], *fixtures: Any) -> None:
    async with HTTPClient() as client:
        await scene(client, *fixtures)


def on_uvloop(scene: Callable[..., Awaitable[None]], *fixtures: Any) -> None:
    """Play a scene on the event loop that the daemon uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(with_client(scene, *fixtures))


SCENES: dict[str, Callable[..., Awaitable[None]]] = {
    "used again": test_a_connection_is_used_again,
    "unasked": test_what_comes_unasked_answers_nobody,
    "silence": test_silence_times_out_and_closes_the_connection,
    "cancelled": test_a_cancelled_request_closes_its_connection,
    "nobody": test_nobody_listens,
    "reset": test_an_answer_that_a_reset_cut_is_none,
    **{name: functools.partial(test_answers_in_every_framing, name) for name in FRAMINGS},
    **{name: functools.partial(test_a_broken_answer_is_none, name) for name in BROKEN},
}


@pytest.mark.parametrize("scene", SCENES)
def test_on_uvloop(scene: str) -> None:
    on_uvloop(SCENES[scene])


@pytest.mark.parametrize("scene", [test_tls, test_a_tunnel_through_a_proxy])
def test_tls_on_uvloop(
    scene: Callable[..., Awaitable[None]], tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_uvloop(scene, tls, monkeypatch)


@pytest.mark.parametrize(
    "name",
    [
        *("Content-Length", "transfer-encoding", "Connection", "Expect", "Upgrade", "Content_Length"),
        *("Content-Length:", "Content-Length: 4, x", "Transfer-Encoding: chunked;x", ":path", "X Y"),
    ],
)
def test_a_header_that_would_shift_the_next_request_is_refused(name: str) -> None:
    """Connections are shared by everybody who calls the same address, whatever headers they send."""
    with pytest.raises(ValueError, match=name):
        Request("http://localhost/v1", {name: "40"})
    with pytest.raises(ValueError, match=name):
        header_lines({name: "40"})
    with pytest.raises(ConfigError, match=name):
        HTTPBackend(HTTPEndpoint(base_url="http://localhost/v1", headers={name: "40"}), HTTPClient())
