"""An HTTP/1.1 client for calls that a stack makes by the thousand, at a sixth of aiohttp's processor time per request.

    client = HTTPClient()
    request = Request("http://host:8000/v1/chat/completions", {"Authorization": "Bearer ..."})
    response = await client.send(request, body, timeout_s=3600)

A request uses an idle connection to the same server or a new one, and the whole answer comes back. There are no cookies,
redirects or streams. httptools (llhttp, which Node and uvicorn use) parses the answers.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import re
import socket
import ssl
import zlib
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, Self, cast
from urllib.request import getproxies, proxy_bypass

import httptools
from multidict import CIMultiDict
from yarl import URL

CONNECT_TIMEOUT_S = 30.0
KEEPALIVE_S = 4.0
"""How long an idle connection is kept. Servers behind uvicorn close one after 5 s, perhaps under a request."""
MAX_BODY = 128 << 20
"""Bytes of one answer, after it was inflated, and of one request to the gateway."""
MAX_HEAD = 64 << 10
"""Bytes of an answer's status line and headers."""
_GZIP_OR_ZLIB = 47
"""For zlib: detect which of the two it is."""
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+: ?[^\r\n\0]*")


class HTTPFailure(Exception):
    """A request that got no usable answer; the message says why."""


class UnreachableError(HTTPFailure):
    """No connection could be made."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class DroppedError(HTTPFailure):
    """The connection ended before the whole answer had arrived, or what arrived is not HTTP."""


class UnusableBodyError(HTTPFailure):
    """An answer whose body is too large or cannot be inflated; the message continues "a body that ..."."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Response(NamedTuple):
    """A whole answer."""

    status: int
    headers: dict[str, str]
    """By lower-case name."""
    body: bytes


class Request:
    """A method, a URL and headers, prepared once and sent any number of times.

    A proxy that the environment names is used. Raises `ValueError` for a URL or headers that cannot be sent.
    """

    def __init__(
        self, url: str | URL, headers: Mapping[str, str] | None = None, *, method: str = "POST"
    ) -> None:
        self.url = url = URL(url)
        self.proxy = proxy_for(url)
        if url.scheme not in ("http", "https") or not url.raw_host:
            raise ValueError(f"{url} is not an http(s) URL")
        self.tls = url.scheme == "https"
        self.authority = f"{url.host_subcomponent}:{url.port}"
        self.address = (url.raw_host, url.port, self.tls, self.proxy)
        fields = CIMultiDict(
            {"Host": url.host_port_subcomponent or "", "User-Agent": "gymgate", "Accept": "*/*"}
        )
        fields["Accept-Encoding"] = "identity"
        if method == "POST":
            fields["Content-Type"] = "application/json"
        if url.user is not None:
            fields["Authorization"] = _basic(url)
        target = url.raw_path_qs
        if self.proxy is not None and not self.tls:
            target = str(url.with_user(None).with_fragment(None))
            fields.update(_proxy_authorization(self.proxy))
        fields.update(headers or {})
        self.head = f"{method} {target} HTTP/1.1\r\n".encode() + header_lines(fields)


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Headers as they are sent; `ValueError` for one that would break the request."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    for line in lines:
        if not _HEADER.fullmatch(line):
            raise ValueError(
                f"header {line.partition(':')[0]!r} holds characters that no HTTP header may hold"
            )
    return "".join(f"{line}\r\n" for line in lines).encode()


def proxy_for(url: URL) -> URL | None:
    """The proxy that the environment names for this URL; never for this machine itself."""
    host = url.host or ""
    if host in ("localhost", "::1") or host.startswith("127."):
        return None
    proxy = getproxies().get(url.scheme)
    return URL(proxy) if proxy and not proxy_bypass(host) else None


class HTTPClient:
    """Connections to any number of servers, without a limit on their number. For one event loop."""

    def __init__(self, keepalive_s: float = KEEPALIVE_S) -> None:
        self._keepalive_s = keepalive_s
        self._open: set[_Connection] = set()
        self._idle: dict[object, deque[_Connection]] = {}
        """By address, the longest idle first."""
        self._sweeper: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def send(
        self, request: Request, body: bytes = b"", *, headers: bytes = b"", timeout_s: float | None = None
    ) -> Response:
        """Send a request and return the answer. Cancelling it closes the connection.

        `headers` are further `header_lines`. Raises `HTTPFailure`, and `TimeoutError` after `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        connection = self._take(request.address, loop.time()) or await self._connect(request, timeout_s)
        head = b"%b%bContent-Length: %d\r\n\r\n" % (request.head, headers, len(body))
        response = await connection.exchange(head, body, None if deadline is None else deadline - loop.time())
        if connection.reusable:
            connection.idle_since = loop.time()
            self._idle.setdefault(request.address, deque()).append(connection)
            if self._sweeper is None:
                self._sweeper = loop.call_later(self._keepalive_s, self._sweep)
        else:
            connection.abort()
        return response if "content-encoding" not in response.headers else _inflated(response)

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._idle.clear()
        for connection in list(self._open):
            connection.abort()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next turn

    def _take(self, address: object, now: float) -> _Connection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.is_usable and now - connection.idle_since < self._keepalive_s:
                return connection
            connection.abort()
        return None

    def _sweep(self) -> None:
        """Close connections that have been idle for too long."""
        loop = asyncio.get_running_loop()
        for address, idle in list(self._idle.items()):
            while idle and loop.time() - idle[0].idle_since >= self._keepalive_s:
                idle.popleft().abort()
            if not idle:
                del self._idle[address]
        self._sweeper = loop.call_later(self._keepalive_s, self._sweep) if self._idle else None

    async def _connect(self, request: Request, timeout_s: float | None) -> _Connection:
        within_s = CONNECT_TIMEOUT_S if timeout_s is None else min(CONNECT_TIMEOUT_S, timeout_s)
        connection = _Connection(self._open)
        try:
            async with asyncio.timeout(within_s):
                await _dial(request, connection)
        except TimeoutError as error:
            raise UnreachableError(f"no connection within {within_s:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise UnreachableError(str(error), retryable=False) from error
        except OSError as error:
            raise UnreachableError(_reason(error)) from error
        finally:
            if not connection.ready:
                connection.abort()
        return connection


async def _dial(request: Request, connection: _Connection) -> None:
    """Connect to the request's server, through its proxy if it has one."""
    loop = asyncio.get_running_loop()
    url = request.proxy or request.url
    if url.scheme != request.url.scheme and url.scheme != "http":
        raise UnreachableError(f"proxy {url.with_user(None)} is not an http:// proxy", retryable=False)
    direct_tls = _tls() if url.scheme == "https" else None
    await loop.create_connection(lambda: connection, url.raw_host or "", url.port or 80, ssl=direct_tls)
    if request.proxy is not None and request.tls:
        lines = header_lines({"Host": request.authority, **_proxy_authorization(request.proxy)})
        await connection.tunnel(f"CONNECT {request.authority} HTTP/1.1\r\n".encode() + lines + b"\r\n")
        transport = await loop.start_tls(
            connection.transport, connection, _tls(), server_hostname=request.url.raw_host
        )
        connection.connection_made(cast(asyncio.Transport, transport))
    connection.ready = True


class _Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    transport: asyncio.Transport

    def __init__(self, open_connections: set[_Connection]) -> None:
        self.ready = False
        """Whether requests can be sent: the tunnel through a proxy, if there is one, stands."""
        self.reusable = False
        """Whether the server keeps the connection open after the last answer."""
        self.idle_since = 0.0
        self._all = open_connections
        self._lost = True
        self._tunnelling = False
        self._answer: asyncio.Future[Response] | None = None
        self._status = self._received = self._size = 0

    @property
    def is_usable(self) -> bool:
        return not self._lost and not self.transport.is_closing()

    async def exchange(self, head: bytes, body: bytes, timeout_s: float | None) -> Response:
        """Send a request and wait for its answer; anything else than an answer ends the connection."""
        if self._lost:
            raise DroppedError("closed at once")
        loop = asyncio.get_running_loop()
        self.reusable = False
        self._status = self._received = self._size = 0
        answer: asyncio.Future[Response] = loop.create_future()
        self._answer = answer
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._fail, TimeoutError())
        self.transport.writelines((head, body))
        try:
            return await answer
        except BaseException:
            self.abort()
            raise
        finally:
            self._answer = None
            if timer is not None:
                timer.cancel()

    async def tunnel(self, head: bytes) -> None:
        """Ask the proxy at the other end for a tunnel; what follows its headers is not HTTP."""
        self._tunnelling = True
        response = await self.exchange(head, b"", None)
        if response.status != 200:
            raise UnreachableError(f"the proxy refused the connection with status {response.status}")
        self._tunnelling = False

    def abort(self) -> None:
        """Close the connection at once."""
        if not self._lost:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._lost = False
        self._all.add(self)
        self._parser = httptools.HttpResponseParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._all.discard(self)
        del self._parser  # it refers to this object
        if self._status and exc is None and not self._is_delimited:
            self._finish()
        else:
            self._fail(DroppedError(_reason(exc) if exc else "closed before the whole answer had arrived"))

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.reusable = False
            self.abort()  # nobody asked for this: it must not become the next request's answer
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(DroppedError(f"answered what is not HTTP: {error}"))
        if self._received - self._size > (MAX_BODY if self._status else MAX_HEAD):
            self._fail(DroppedError(f"sent more than {MAX_HEAD} bytes of headers"))

    def on_message_begin(self) -> None:
        """See `httptools.HTTPProtocol`. An answer beyond the one asked for ends the use of the connection."""
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._status = 0
        self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also called for trailers, which nobody reads."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        length = self._headers.get("content-length")
        self._is_delimited = length is not None or "transfer-encoding" in self._headers
        if self._tunnelling:
            self._finish()
        elif length is not None and int(length) > MAX_BODY:
            self._fail(_too_long(self._status))

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._size += len(body)
        if self._size > MAX_BODY:
            self._fail(_too_long(self._status))

    def on_message_complete(self) -> None:
        if self._status >= 200 and self._answer is not None and not self._answer.done():
            self.reusable = self._parser.should_keep_alive()
            self._finish()

    def _finish(self) -> None:
        if self._answer is not None and not self._answer.done():
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._answer.set_result(Response(self._status, self._headers, body))

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()


def _inflated(response: Response) -> Response:
    """The response with its compression undone, which it was not asked for, and never more than `MAX_BODY` of it."""
    encoding = response.headers["content-encoding"].strip().lower()
    if encoding in ("", "identity"):
        return response
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise UnusableBodyError(
            f"has Content-Encoding {encoding!r}, although it was asked for none", response.status
        )
    inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        body = inflater.decompress(response.body, MAX_BODY + 1)
    except zlib.error as error:
        message = f"is not {encoding}, although its headers say so: {error}"
        raise UnusableBodyError(message, response.status) from error
    if len(body) > MAX_BODY:
        raise _too_long(response.status)
    if not inflater.eof:
        raise UnusableBodyError(f"is not whole: its {encoding} data end too early", response.status)
    return response._replace(body=body)


def _too_long(status: int) -> UnusableBodyError:
    return UnusableBodyError(f"holds more than {MAX_BODY} bytes", status)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _basic(url: URL) -> str:
    return "Basic " + base64.b64encode(f"{url.user or ''}:{url.password or ''}".encode()).decode()


def _proxy_authorization(proxy: URL) -> dict[str, str]:
    return {} if proxy.user is None else {"Proxy-Authorization": _basic(proxy)}


def _reason(error: Exception) -> str:
    """Why a connection failed, in the system's words."""
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError | socket.gaierror):
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
