"""The way to a stack that another machine serves: TCP or TLS, and then the protocol of a daemon.

Two calls come before the daemon's `hello`. In `enter` both ends give a random text, in `prove` each shows that it has the
token, the caller first. The token itself is never sent: whoever listens at the port of a server that is down, as another
user of the machine may, gets neither it nor a rollout.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

from gymgate.core.config import StackConfig, StackServer
from gymgate.core.errors import ConfigError, StackLostError
from gymgate.core.http_client import MAX_BODY, is_loopback, keep_alive
from gymgate.stack.client import Lease
from gymgate.stack.protocol import Peer

HANDSHAKE_S = 10.0
"""For a connection, its TLS handshake, and both proofs that the token is known, together."""
HANDSHAKE_FRAMES = 2
"""From each end until both proofs are there: `enter` and `prove`."""
MAX_HANDSHAKE = 64 << 10
"""Bytes of a frame until `hello` is answered."""
MAX_ANSWER = 4 * MAX_BODY
"""Bytes of a frame that a server sends, a rollout's record included."""
SILENT_S = 60
"""After bytes that the other machine's kernel does not acknowledge."""
_CALLERS_OWN = {"environments", "server", "share"}
"""Settings of a stack that its caller may have; all others are the server's."""


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
    lease = Lease(lambda: f"{server.url} closed the connection; is it a `gymgate serve-stack`?", None)
    lease.peer.max_frame = MAX_HANDSHAKE
    lease.peer.frames_left = HANDSHAKE_FRAMES
    lease.peer.handlers.clear()  # such a server takes no callables, so it has nothing to call here
    try:
        where = (url.hostname or "", url.port or 0)
        sock = await asyncio.to_thread(socket.create_connection, where, HANDSHAKE_S)
        try:
            if not tls and not is_loopback(sock.getpeername()[0]):
                raise ConfigError(f"{server.url} is not encrypted and not on this machine; use gymgates://")
            notice_silence(sock)
            sock.setblocking(False)
            async with asyncio.timeout(HANDSHAKE_S):
                await loop.create_connection(lambda: lease.peer, sock=sock, **tls)
                await _prove(lease.peer, server, token)
        except BaseException:
            lease.peer.abort()
            sock.close()
            raise
    except ssl.SSLCertVerificationError as error:
        reason = f"{error.verify_message}; `certificates` is a file of those to trust"
        raise ConfigError(f"the certificate of {server.url} is not trusted: {reason}") from None
    except StackLostError:
        raise
    except OSError as error:  # TimeoutError is one
        raise StackLostError(f"cannot reach the stack at {server.url}: {_reason(error)}") from None
    lease.peer.describe_loss = lambda: f"the connection to the stack at {server.url} is lost"
    lease.peer.max_frame, lease.peer.frames_left = MAX_ANSWER, None
    return lease, sock


async def _prove(peer: Peer, server: StackServer, token: str) -> None:
    """Show the server that this process has the token, and see that the server has it. Raises `ConfigError` if not."""
    ours = secrets.token_hex(16)
    theirs = await peer.call("enter", nonce=ours)
    try:
        answer = await peer.call("prove", proof=proof(token, "caller", ours, theirs))
    except ConfigError:
        raise ConfigError(f"{server.url} refused the token in {server.token_env!r}") from None
    if not proves(answer, token, "server", ours, theirs):
        raise ConfigError(
            f"{server.url} does not have the token in {server.token_env!r}: another program listens there"
        )


def proof(token: str, role: str, callers: Any, servers: Any) -> str:
    """Return what only an end of this role that has the token can say to these two random texts."""
    message = f"gymgate {role} {callers} {servers}"
    return hmac.digest(token.encode(), message.encode(errors="replace"), "sha256").hex()


def proves(value: Any, token: str, role: str, callers: Any, servers: Any) -> bool:
    """Whether the other end's value is this proof. Takes the same time whatever the value is."""
    expected = proof(token, role, callers, servers)
    return hmac.compare_digest(str(value).encode(errors="replace"), expected.encode())


def notice_silence(sock: socket.socket) -> None:
    """End the connection if the other machine vanishes, also while bytes are on the way there."""
    keep_alive(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)


def _reason(error: OSError) -> str:
    return str(error.strerror or error or type(error).__name__)
