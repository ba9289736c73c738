"""An HTTP/1.1 client for high call volumes; it uses about a sixth of aiohttp's CPU time.

    client = HTTPClient()
    request = Request("http://host:8000/v1/chat/completions", {"Authorization": "Bearer ..."})
    response = await client.send(request, body, timeout_s=3600)

A request uses an idle connection to the same server or a new one, and the whole answer comes back. There are no cookies,
redirects or streams. httptools (llhttp, which Node and uvicorn use) parses the answers.

An answer must never reach another rollout, and HTTP/1.1 does not say which request an answer belongs to. So a connection on
which bytes wait is not used, an answer that was sent before a byte of its request had reached the other machine is refused,
and a server that once sent an answer too many gets a new connection for each request. (aiohttp's client does none of this.)
Whatever a server sends is bounded. A request has arrived once the server's kernel has it, on this machine at once. Whether the
server has read it before it answers is not to be seen.
"""

from __future__ import annotations

import array
import asyncio
import base64
import fcntl
import functools
import io
import ipaddress
import logging
import os
import re
import select
import socket
import ssl
import termios
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httptools
from multidict import CIMultiDict
from yarl import URL

CONNECT_TIMEOUT_S = 30.0
KEEPALIVE_S = 4.0
"""How long an idle connection is kept. Servers behind uvicorn close one after 5 s, perhaps under a request."""
VANISHED_S = 15
"""A machine whose kernel acknowledges nothing for this long has vanished. The process there may take as long as it wants."""
MAX_BODY = 128 << 20
"""Bytes of one answer of an endpoint, after it was inflated, and of one request to the gateway."""
MAX_HEAD = 64 << 10
"""Bytes of an answer's status lines, headers and trailers, those of interim answers included."""
MAX_FRAMING = 2 << 20
"""Bytes between the chunks of a body: 400,000 chunks, which take half a second."""
_GZIP_OR_ZLIB = 47
"""For zlib: detect which of the two it is."""
_COUNT = array.array("i", [0])
_INFLATED_AT_ONCE = 1 << 20
_DEFLATED_AT_ONCE = 16 << 10
"""Bytes between two turns of the event loop."""
_VANISHED = f"nothing was acknowledged for {VANISHED_S} s"
_UNASKED = "it sent an answer before it had got the request"
_IDLE_TOO_LONG = (b"HTTP/1.1 408", b"HTTP/1.0 408")
"""What load balancers say before they close an idle connection; it answers no request."""
_REFUSED_BY_PROXY = {
    403: "no_proxy lists the hosts to be reached past it",
    407: "put user and password into its address",
}
"""What to do about a proxy's status that waiting does not change."""
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[^\r\n\0]*")
_FRAMING = frozenset(
    [
        "connection",
        "content-length",
        "expect",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)
"""Headers that say where a message ends, or are for one connection: the client's business. Given twice, they would leave
part of a request in front of the connection's next one."""

logger = logging.getLogger(__name__)


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
    """By lower-case name; several cookies have a line each."""
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

    def refuse_header(self, name: str) -> None:
        """Raises `ValueError` for a header that cannot be sent with this request: it would break it, or be there twice."""
        header_lines({name: ""})
        if f"\r\n{name}:".lower().encode() in self.head.lower():
            raise ValueError(f"header {name!r} cannot be given: each request has it already")


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Headers as they are sent; `ValueError` for one that would break the request, or the next one on its connection."""
    for name, value in headers.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"header {name!r} holds characters that no HTTP header may hold")
        if name.lower().replace("_", "-") in _FRAMING:  # some servers read `_` as `-`
            raise ValueError(f"header {name!r} cannot be given: it is set for each request")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()


def proxy_for(url: URL) -> URL | None:
    """The proxy that the environment names for this URL; never for this machine itself. Without a scheme it is an http:// one.

    Raises `ValueError`, without the text, which may hold a password.
    """
    host = url.host or ""
    proxy = None if is_loopback(host) else getproxies().get(url.scheme)
    if not proxy or proxy_bypass(host):
        return None
    try:
        address = URL(proxy if "://" in proxy else f"http://{proxy}")
    except ValueError:
        address = URL()
    if not address.raw_host:
        raise ValueError(f"the environment's {url.scheme} proxy is not a URL such as http://host:3128")
    return address


LOOPBACK = "127.0.0.1"
"""Where everything listens unless told otherwise."""


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name, such as 127.example.com
        return False


def is_for_loopback(header: str) -> bool:
    """Whether a `Host` header has this machine's loopback interface. A web site may have its own name resolved to that."""
    try:
        return is_loopback(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False


def url_host(host: str) -> str:
    """Return a host as URLs have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


class HTTPClient:
    """Connections to any number of servers, without a limit on their number. For one event loop.

    `max_body` is the most bytes of one answer, after it was inflated; `MAX_BODY` unless given.
    """

    def __init__(self, keepalive_s: float = KEEPALIVE_S, max_body: int | None = None) -> None:
        self._keepalive_s = keepalive_s
        self._given_max_body = max_body
        self._open: set[_Connection] = set()
        self._idle: dict[object, deque[_Connection]] = {}
        """By address, the longest idle first."""
        self._untrusted: set[object] = set()
        """Addresses of servers that sent an answer too many."""
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def _max_body(self) -> int:
        return MAX_BODY if self._given_max_body is None else self._given_max_body

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
        if connection.reusable and request.address not in self._untrusted:
            connection.idle_since = loop.time()
            self._idle.setdefault(request.address, deque()).append(connection)
            if self._sweeper is None:
                self._sweeper = loop.call_later(self._keepalive_s, self._sweep)
        else:
            connection.abort()
        return (
            response
            if "content-encoding" not in response.headers
            else await _inflated(response, self._max_body)
        )

    async def close(self) -> None:
        """Close all connections; requests under way fail."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._idle.clear()
        for connection in [*self._open]:
            connection.abort()
        await asyncio.sleep(0)  # transports close their sockets in the loop's next turn

    def _take(self, address: object, now: float) -> _Connection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()  # the one used last, so that the others become old enough to be closed
            is_fresh = now - connection.idle_since < self._keepalive_s
            if is_fresh and connection.is_usable and not connection.has_input():
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

    def _distrust(self, request: Request) -> None:
        """From now on, use each connection to this server for one request."""
        if request.address not in self._untrusted:
            self._untrusted.add(request.address)
            logger.warning(
                "%s sent more than was asked for; each request gets a new connection from now on",
                request.authority,
            )
        for connection in self._idle.pop(request.address, ()):
            connection.abort()

    async def _connect(self, request: Request, timeout_s: float | None) -> _Connection:
        within_s = CONNECT_TIMEOUT_S if timeout_s is None else min(CONNECT_TIMEOUT_S, timeout_s)
        connection = _Connection(self._open, functools.partial(self._distrust, request), self._max_body)
        try:
            async with asyncio.timeout(within_s):
                await _dial(request, connection)
        except TimeoutError as error:
            raise UnreachableError(f"no connection within {within_s:g} s") from error
        except ssl.SSLCertVerificationError as error:
            raise UnreachableError(_distrusted(error), retryable=False) from error
        except (OSError, UnicodeError) as error:  # no DNS name has an empty label or one of 64 characters
            # TLS is spoken with the server behind the proxy.
            proxy = None if isinstance(error, ssl.SSLError) else request.proxy
            where = f"the proxy {proxy.with_user(None)}: " if proxy else ""
            raise UnreachableError(where + _reason(error)) from error
        finally:
            if not connection.ready:
                connection.abort()
        if not request.tls and connection.is_usable and connection.has_input():
            # With TLS these may be the server's session tickets.
            connection.abort()
            raise DroppedError(_UNASKED)
        return connection


async def _dial(request: Request, connection: _Connection) -> None:
    """Connect to the request's server, through its proxy if it has one."""
    loop = asyncio.get_running_loop()
    url = request.proxy or request.url
    if url.scheme != request.url.scheme and url.scheme != "http":
        raise UnreachableError(f"proxy {url.with_user(None)} is not an http:// proxy", retryable=False)
    await loop.create_connection(lambda: connection, url.raw_host or "", url.port or 80)
    if url.scheme == "https":
        await _start_tls(connection, url)
    if request.proxy is not None and request.tls:
        lines = header_lines({"Host": request.authority, **_proxy_authorization(request.proxy)})
        await connection.tunnel(url, f"CONNECT {request.authority} HTTP/1.1\r\n".encode() + lines + b"\r\n")
        await _start_tls(connection, request.url)
    connection.ready = True


async def _start_tls(connection: _Connection, url: URL) -> None:
    transport = await asyncio.get_running_loop().start_tls(
        connection.transport, connection, _tls(), server_hostname=url.raw_host
    )
    connection.connection_made(cast(asyncio.Transport, transport))


class _Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    transport: asyncio.Transport

    def __init__(
        self, open_connections: set[_Connection], unasked: Callable[[], None], max_body: int
    ) -> None:
        self._max_body = max_body
        self.ready = False
        """Whether requests can be sent: the tunnel through a proxy, if there is one, stands."""
        self.reusable = False
        """Whether the server keeps the connection open after the last answer."""
        self.idle_since = 0.0
        self._all = open_connections
        self._unasked = unasked
        self._lost = True
        self._tunnelling = False
        self._answer: asyncio.Future[Response] | None = None
        self._status = self._received = self._head_size = self._size = self._unacknowledged = 0
        self._body = io.BytesIO()

    @property
    def is_usable(self) -> bool:
        return not self._lost and not self.transport.is_closing()

    def has_input(self) -> bool:
        """Whether bytes, or the connection's end, wait to be read. A busy event loop has not seen them yet."""
        return bool(self._poll.poll(0))

    async def exchange(self, head: bytes, body: bytes, timeout_s: float | None) -> Response:
        """Send a request and wait for its answer; anything else than an answer ends the connection."""
        if self._lost:
            raise DroppedError("closed at once")
        loop = asyncio.get_running_loop()
        self.reusable = False
        self._status = self._received = self._head_size = self._size = 0
        answer: asyncio.Future[Response] = loop.create_future()
        self._answer = answer
        timers = [] if timeout_s is None else [loop.call_later(timeout_s, self._fail, TimeoutError())]
        self.transport.writelines((head, body))
        if not self._is_near:
            waiting = _unacknowledged(self._fd)
            # Of a request that this process still holds a part of, nobody can tell whether a byte has arrived.
            self._unacknowledged = waiting if waiting >= len(head) + len(body) else 0
            timers.append(loop.call_later(VANISHED_S, self._check_acknowledged, waiting))
        try:
            return await answer
        except BaseException:
            self.abort()  # a late answer would be taken for that of the next request
            raise
        finally:
            self._answer = None
            for timer in timers:
                timer.cancel()

    async def tunnel(self, proxy: URL, head: bytes) -> None:
        """Ask the proxy at the other end for a tunnel; what follows its headers is not HTTP."""
        self._tunnelling = True
        response = await self.exchange(head, b"", None)
        if response.status != 200:
            advice = _REFUSED_BY_PROXY.get(response.status)
            reason = f"the proxy {proxy.with_user(None)} refused the connection with status {response.status}"
            raise UnreachableError(f"{reason}; {advice}" if advice else reason, retryable=advice is None)
        self._tunnelling = False

    def abort(self) -> None:
        """Close the connection at once."""
        if not self._lost:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # uvloop otherwise sends a request at the end of the loop's turn, when something may wait that has_input did not see.
        self.transport.set_write_buffer_limits(high=0)
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._is_near = is_loopback(transport.get_extra_info("peername")[0])  # acknowledges at once
        if not self._is_near:
            keep_alive(transport.get_extra_info("socket"))
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._lost = False
        self._all.add(self)
        self._parser = httptools.HttpResponseParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._all.discard(self)
        del self._parser  # it refers to this object
        if self._status >= 200 and exc is None and not self._is_delimited:
            self._finish()
        else:
            self._fail(DroppedError(_reason(exc) if exc else "closed before the whole answer had arrived"))

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.reusable = False
            self.abort()
            if not data.startswith(_IDLE_TOO_LONG):
                self._unasked()
            return
        if self._unacknowledged:
            # The server's first byte acknowledges what it had got by then.
            if _unacknowledged(self._fd) >= self._unacknowledged:
                self._fail(DroppedError(_UNASKED))
                return
            self._unacknowledged = 0
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            refused = error.__context__ if isinstance(error.__context__, HTTPFailure) else None
            self._fail(refused or DroppedError(f"sent a malformed HTTP response: {error}"))
            return
        beside = self._received - self._size
        if beside > (MAX_FRAMING if self._status >= 200 else MAX_HEAD):
            what = "between the chunks of its body" if self._status >= 200 else "of headers"
            self._fail(DroppedError(f"sent {beside} bytes {what}"))

    def on_message_begin(self) -> None:
        """See `httptools.HTTPProtocol`, whose methods may raise to stop the parser."""
        if self._answer is None or self._answer.done():
            self.reusable = False
            self._unasked()
            raise DroppedError(_UNASKED)
        self._headers: dict[str, str] = {}
        self._body = io.BytesIO()
        self._status = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also called for trailers, which nobody reads."""
        self._head_size += len(name) + len(value) + len(": \r\n")
        if self._head_size > MAX_HEAD:
            raise DroppedError(f"sent more than {MAX_HEAD} bytes of headers")
        if not self._status:
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            if key == "set-cookie" and key in self._headers:  # the one header that comes several times
                text = f"{self._headers[key]}\n{text}"
            self._headers[key] = text

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        length = self._headers.get("content-length")
        self._is_delimited = length is not None or "transfer-encoding" in self._headers
        if self._tunnelling:
            self._finish()
        elif length is not None and int(length) > self._max_body:
            raise _too_long(self._status, self._max_body)

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._max_body:
            raise _too_long(self._status, self._max_body)
        self._body.write(body)

    def on_message_complete(self) -> None:
        if self._status >= 200 and self._answer is not None and not self._answer.done():
            # After an early answer, the rest of this request would be read as the beginning of the next.
            self.reusable = self._parser.should_keep_alive() and not self.transport.get_write_buffer_size()
            self._finish()

    def _check_acknowledged(self, sent: int) -> None:
        """End the connection if not a byte of the request was acknowledged. Keepalive begins only after acknowledged bytes.

        `TCP_USER_TIMEOUT` would also end the connection to a live server that reads a long request late.
        """
        if sent and _unacknowledged(self._fd) >= sent:
            self._fail(DroppedError(_VANISHED))

    def _finish(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Response(self._status, self._headers, self._body.getvalue()))

    def _fail(self, error: BaseException) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self.abort()


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel end the connection if the other machine vanishes while this one waits for an answer."""
    interval_s = VANISHED_S // 5
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2 * interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _unacknowledged(fd: int) -> int:
    """The bytes sent that the other end's kernel has not acknowledged; 0 for a connection that was just closed."""
    try:
        fcntl.ioctl(fd, termios.TIOCOUTQ, _COUNT)
    except OSError:
        return 0
    return _COUNT[0]


async def _inflated(response: Response, max_body: int) -> Response:
    """The response with its compression undone, which it was not asked for, and never more than `max_body` of it."""
    encoding = response.headers["content-encoding"].strip().lower()
    if encoding in ("", "identity"):
        return response
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise UnusableBodyError(
            f"has Content-Encoding {encoding!r}, although it was asked for none", response.status
        )
    inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
    body = io.BytesIO()
    try:
        for start in range(0, len(response.body), _DEFLATED_AT_ONCE):
            deflated = response.body[start : start + _DEFLATED_AT_ONCE]
            while deflated and not inflater.eof:
                body.write(inflater.decompress(deflated, _INFLATED_AT_ONCE))
                if body.tell() > max_body:
                    raise _too_long(response.status, max_body)
                deflated = inflater.unconsumed_tail
                if deflated or start + _DEFLATED_AT_ONCE < len(response.body):
                    await asyncio.sleep(0)
        body.write(inflater.flush())
    except zlib.error as error:
        message = f"is not {encoding}, although its headers say so: {error}"
        raise UnusableBodyError(message, response.status) from error
    if not inflater.eof:
        raise UnusableBodyError(f"is not whole: its {encoding} data end too early", response.status)
    return response._replace(body=body.getvalue())


def _too_long(status: int, max_body: int) -> UnusableBodyError:
    return UnusableBodyError(f"holds more than {max_body} bytes", status)


_BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
"""Variables that name a file of CA certificates to trust: OpenSSL's, and that of requests."""
_NO_KNOWN_CA = (18, 19, 20, 21)
"""OpenSSL's codes for a certificate that no trusted CA signed (X509_V_ERR_* in x509_vfy.h)."""


@functools.cache
def _tls() -> ssl.SSLContext:
    """Trust what OpenSSL does, whose file of certificates `SSL_CERT_FILE` replaces, and `REQUESTS_CA_BUNDLE`'s.

    Raises `UnreachableError` for a file that cannot be read, which OpenSSL would take for an empty one.
    """
    context = ssl.create_default_context()
    for variable in _BUNDLES:
        if bundle := os.environ.get(variable):
            try:
                context.load_verify_locations(**{"capath" if Path(bundle).is_dir() else "cafile": bundle})
            except OSError as error:
                raise UnreachableError(
                    f"{variable}={bundle} holds no certificates that can be read ({_reason(error)})",
                    retryable=False,
                ) from error
    return context


def _distrusted(error: ssl.SSLCertVerificationError) -> str:
    """Why a certificate is not trusted, and what to do where a network has its own CA."""
    reason = f"its certificate is not trusted: {getattr(error, 'verify_message', '') or error}"
    if getattr(error, "verify_code", None) not in _NO_KNOWN_CA:
        return reason
    bundle = os.environ.get("SSL_CERT_FILE")
    now = f", which is {bundle} now" if bundle else ""
    return f"{reason}; if your network has its own CA, set SSL_CERT_FILE{now}, to its certificate file"


def _basic(url: URL) -> str:
    return "Basic " + base64.b64encode(f"{url.user or ''}:{url.password or ''}".encode()).decode()


def _proxy_authorization(proxy: URL) -> dict[str, str]:
    return {} if proxy.user is None else {"Proxy-Authorization": _basic(proxy)}


_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE")
"""What OpenSSL says of an answer in plain HTTP."""


def _reason(error: Exception) -> str:
    """Why a connection failed, in the system's words."""
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return "it does not answer in TLS; write http:// if it has none"
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError | socket.gaierror):
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
