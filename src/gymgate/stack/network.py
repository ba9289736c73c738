"""The way to a stack that another machine serves: TCP or TLS, a token, and then the protocol of a daemon.

The caller's first line is the token. The server answers one line, the same for every token that it refuses, and closes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

from gymgate.core.config import StackConfig, StackServer
from gymgate.core.errors import ConfigError, StackLostError
from gymgate.core.http_client import is_loopback, keep_alive
from gymgate.stack.client import Lease

HANDSHAKE_S = 10.0
"""For a connection, its TLS handshake, and its first line, each."""
SILENT_S = 60
"""After bytes that the other machine's kernel does not acknowledge."""
MAX_LINE = 1024
"""Bytes of a first line."""
ACCEPTED = b"accepted"
_CALLERS_OWN = {"environments", "server", "share"}
"""Settings of a stack that its caller may have; all others are the server's."""


class FirstLine(asyncio.Protocol):
    """Reads one line, bounded in length and time, and hands the connection over to the protocol that `on_line` returns.

    `on_line` gets `None` if no line came. It returns `None` to end the connection.
    """

    def __init__(self, on_line: Callable[[asyncio.Transport, bytes | None], asyncio.Protocol | None]) -> None:
        self._on_line = on_line
        self._buffer = b""
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._over:
            return
        line, newline, rest = (self._buffer + data).partition(b"\n")
        if not newline and len(line) <= MAX_LINE:
            self._buffer = line
            return
        self._over = True
        transport = self._transport
        if (following := self._on_line(transport, line if len(line) <= MAX_LINE else None)) is None:
            transport.close()  # the timer ends it if the other end does not
            return
        self._timer.cancel()
        transport.set_protocol(following)
        following.connection_made(transport)
        if rest:
            following.data_received(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._timer.cancel()
        if not self._over:
            self._on_line(self._transport, None)


def refuse_settings(config: StackConfig) -> None:
    """Raise `ConfigError` for settings of a stack that its server decides."""
    fields = sorted(config.model_dump(exclude_defaults=True).keys() - _CALLERS_OWN)
    for environment in config.environments:
        fields += sorted(environment.model_dump(exclude_defaults=True).keys() - {"name"})
    if fields:
        raise ConfigError(f"{', '.join(fields)}: set on the command line of `gymgate serve-stack`, not here")


async def connect_to(server: StackServer) -> tuple[Lease, socket.socket]:
    """Return a connection on which hello can be said, and its socket.

    Raises `ConfigError` for a token or a certificate that is refused, and `StackLostError` if nobody answers.
    """
    url, loop = urlsplit(server.url), asyncio.get_running_loop()
    if not (token := os.environ.get(server.token_env)):
        raise ConfigError(f"environment variable {server.token_env!r} is not set (token of {server.url})")
    try:
        context = ssl.create_default_context(cafile=server.certificates)
    except OSError as error:
        raise ConfigError(
            f"certificates {server.certificates!r} are not readable: {_reason(error)}"
        ) from None
    tls: dict[str, Any] = (
        {"ssl": context, "server_hostname": url.hostname} if url.scheme == "gymgates" else {}
    )
    lease = Lease(lambda: f"the connection to the stack at {server.url} is lost", None)
    answered: asyncio.Future[bytes | None] = loop.create_future()

    def on_line(_: asyncio.Transport, line: bytes | None) -> asyncio.Protocol | None:
        if not answered.done():
            answered.set_result(line)
        return lease.peer if line == ACCEPTED else None

    try:
        where = (url.hostname or "", url.port or 0)
        sock = await asyncio.to_thread(socket.create_connection, where, HANDSHAKE_S)
        try:
            if not tls and not is_loopback(sock.getpeername()[0]):
                raise ConfigError(f"{server.url} is not encrypted and not on this machine; use gymgates://")
            notice_silence(sock)
            sock.setblocking(False)
            async with asyncio.timeout(2 * HANDSHAKE_S):
                transport, _ = await loop.create_connection(lambda: FirstLine(on_line), sock=sock, **tls)
                transport.write(token.encode() + b"\n")
                line = await answered
        except BaseException:
            sock.close()
            raise
    except ssl.SSLCertVerificationError as error:
        reason = f"{error.verify_message}; `certificates` is a file of those to trust"
        raise ConfigError(f"the certificate of {server.url} is not trusted: {reason}") from None
    except OSError as error:  # TimeoutError is one
        raise StackLostError(f"cannot reach the stack at {server.url}: {_reason(error)}") from None
    if line is None:
        raise StackLostError(f"{server.url} closed the connection; is it a `gymgate serve-stack`?")
    if line != ACCEPTED:
        raise ConfigError(f"{server.url} refused the token in {server.token_env!r}")
    return lease, sock


def notice_silence(sock: socket.socket) -> None:
    """End the connection if the other machine vanishes, also while bytes are on the way there."""
    keep_alive(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)


def _reason(error: OSError) -> str:
    return str(error.strerror or error or type(error).__name__)
