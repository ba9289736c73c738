"""A stack of this machine, served to callers on others. What they ask is checked here, and then passed on to the daemon.

A caller with the token can run rows, in the stack's environments, with policies at HTTP endpoints, and see the status. It
can name no file, no variable and no setting of this machine.

Why the daemon does not listen to other machines itself: what strangers send is read in another process than the one that runs
everybody's rollouts and has their keys, and callers stay connected while a daemon that died is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import resource
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationError
from yarl import URL

from gymgate.core import codec
from gymgate.core.config import Config, HTTPEndpoint, RolloutLimits, StackConfig, validation_message
from gymgate.core.errors import ConfigError, DataError
from gymgate.core.http_client import MAX_BODY, is_loopback
from gymgate.gateway.serving_process import raise_file_limit
from gymgate.gym.runtime.command import Progress
from gymgate.rollouts.row_fields import row_json
from gymgate.stack.client import Stack, checked_id
from gymgate.stack.leases import connect
from gymgate.stack.network import (
    HANDSHAKE_FRAMES,
    HANDSHAKE_S,
    MAX_HANDSHAKE,
    notice_silence,
    proof,
    proves,
    refuse_settings,
)
from gymgate.stack.protocol import Peer, Reply, refuse_protocol
from gymgate.stack.wire import endpoint_to_wire

MIN_TOKEN = 16
"""Characters: whoever reaches the port may guess, as often as it takes connections."""
MAX_FRAME = MAX_BODY
"""Bytes of one message of a caller, a row included."""
MAX_STRANGERS = 256
"""Connections that have not shown the token, and at most a quarter of the files that may be open."""
ACCEPT_AGAIN_S = 0.1
"""After a connection could not be accepted: without a pause, a full table of files would use a whole processor."""
ONLY_HTTP = "a stack of another machine runs policies at HTTP endpoints only (no callables, recordings or token engines)"

logger = logging.getLogger(__name__)


async def serve_stack(
    config: StackConfig,
    listener: socket.socket,
    token: str,
    context: ssl.SSLContext | None,
    ready: Callable[[], None],
    progress: Progress,
) -> None:
    """Serve a stack to callers that have the token, until cancelled; their rollouts end then.

    The stack is started first, and again after it was lost. Raises what keeps it from starting, and `ConfigError` for a
    token that is too short or no line, and for an address beyond loopback without TLS.
    """
    if len(token) < MIN_TOKEN or not token.isprintable():
        raise ConfigError(f"the token must have at least {MIN_TOKEN} characters, all printable")
    if context is None and not is_loopback(address := listener.getsockname()[0]):
        raise ConfigError(f"{address} is not loopback, so it needs TLS: --certificate FILE --key FILE")
    stack = await connect(config, progress=progress, reconnect=True)
    server = _Server(stack, token, context, listener.getsockname()[1])
    try:
        ready()
        await server.accept(listener)
    finally:
        server.close()
        await stack.close()


class _Server:
    """Accepts callers. A connection that has not shown the token yet is dropped after a while, or for newer ones."""

    def __init__(self, stack: Stack, token: str, context: ssl.SSLContext | None, port: int) -> None:
        self.stack = stack
        self.token = token
        self.port = port
        self._context = context
        self._callers: set[_Caller] = set()
        """Those that have shown the token."""
        self._strangers: dict[asyncio.Task[None], None] = {}
        """The tasks of those that have not, oldest first."""

    async def accept(self, listener: socket.socket) -> None:
        """Serve whoever connects."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        raise_file_limit()
        most = min(MAX_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is free, or the caller has left again
                logger.warning("cannot accept a connection: %s", error)
                await self._drop_oldest()
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self._strangers) >= most:
                await self._drop_oldest()
            task = asyncio.create_task(self._admit(sock))
            self._strangers[task] = None
            task.add_done_callback(lambda done: self._strangers.pop(done, None))

    def close(self) -> None:
        """Drop every connection."""
        for task in self._strangers:
            task.cancel()
        for caller in [*self._callers]:
            caller.peer.abort()

    async def _admit(self, sock: socket.socket) -> None:
        """Serve a connection from when it has shown the token; drop one that does not in time."""
        caller = _Caller(self, self._callers.discard)
        options: dict[str, Any] = {} if self._context is None else {"ssl": self._context}
        loop = asyncio.get_running_loop()
        # Accepted by hand, so that connections in the middle of a TLS handshake are counted too.
        with contextlib.suppress(OSError):  # TimeoutError is one
            try:
                notice_silence(sock)
                async with asyncio.timeout(HANDSHAKE_S):
                    await loop.connect_accepted_socket(lambda: caller.peer, sock, **options)
                    await caller.decided.wait()
            finally:
                if caller.admitted:
                    self._callers.add(caller)
                else:
                    caller.peer.abort()
                    sock.close()

    async def _drop_oldest(self) -> None:
        if self._strangers:
            oldest = next(iter(self._strangers))
            oldest.cancel()
            await asyncio.wait(
                [oldest]
            )  # a burst is accepted without a pause, in which nothing would be closed
            self._strangers.pop(oldest, None)


class _Message(Config):
    """What a caller says of a rollout."""

    policy: HTTPEndpoint
    judge_policy: HTTPEndpoint | None
    limits: RolloutLimits
    rollout_id: Annotated[str, AfterValidator(checked_id)]
    record_bodies: bool
    environment: str | None
    agent: str | None
    environment_server: str | None = None
    taskset: str | None = None


class _Caller:
    """One connection of a process on another machine. Its rollouts end with it."""

    def __init__(self, server: _Server, on_lost: Callable[[_Caller], None]) -> None:
        self.server = server
        self.stack = server.stack
        self.admitted = False
        """Whether it has shown the token."""
        self.decided = asyncio.Event()
        """It has shown the token, or is lost."""
        self._on_lost = on_lost
        self._nonces: tuple[Any, str] | None = None
        """Its own random text, and the server's."""
        self._environment: str | None = None
        """The only environment that it asked for, if it is one."""
        self.peer = Peer(
            {"enter": self._enter, "prove": self._prove},
            on_lost=self._lost,
            describe_loss=lambda: "the caller is gone",
            max_frame=MAX_HANDSHAKE,
            waits_for_reader=True,
        )
        self.peer.frames_left = HANDSHAKE_FRAMES

    def _lost(self) -> None:
        self.decided.set()
        self._on_lost(self)

    async def _enter(self, message: dict[str, Any], _: bytes) -> str:
        if self._nonces is None:  # one that could be chosen again would help to guess
            self._nonces = (message.get("nonce"), secrets.token_hex(16))
        return self._nonces[1]

    async def _prove(self, message: dict[str, Any], _: bytes) -> str:
        """Let a caller with the token in. Any other gets the same answer, and its connection ends."""
        nonces, self._nonces = self._nonces, None
        if nonces is None or not proves(message.get("proof"), self.server.token, "caller", *nonces):
            asyncio.get_running_loop().call_soon(self.peer.close)  # after the answer
            raise ConfigError("refused")
        self.admitted = True
        self.decided.set()
        self.peer.frames_left = None
        self.peer.handlers = {
            "hello": self._hello,
            "bye": self._bye,
            "run": self._run,
            "status": self._status,
        }
        self.peer.listeners["ping"] = lambda _: self.peer.tell("pong")
        return proof(self.server.token, "server", *nonces)

    async def _hello(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """Answer if the caller asks for nothing but environments of the stack."""
        refuse_protocol(message.get("protocol"), "server")
        try:
            config = StackConfig.model_validate(message.get("config"))
        except ValidationError as error:
            raise ConfigError(validation_message(error)) from None
        refuse_settings(config)
        description = self.stack.description
        served = {**{name: name for name in description["names"].values()}, **description["names"]}
        requested = {environment.name for environment in config.environments}
        if unknown := requested - served.keys():
            raise ConfigError(
                f"environment {min(unknown)!r} is not served here; available: {', '.join(sorted(served))}"
            )
        self._environment = min(requested) if len(requested) == 1 else None
        self.peer.max_frame = MAX_FRAME
        names = {name: served[name] for name in requested}
        of_all = description["settings"]
        environments = [
            {**each, "overrides": _digest(each["overrides"])}
            for each in of_all["environments"]
            if each["name"] in names.values()
        ]
        return {
            **description,
            "names": names,
            "settings": {**of_all, "environments": environments},
            "pid": None,
        }

    async def _bye(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        return {"last": False}

    async def _run(self, message: dict[str, Any], row: bytes) -> Reply:
        """Run a row. Only what is checked here reaches the daemon, which trusts its callers."""
        for name in ("policy", "judge_policy"):
            endpoint = message.get(name)
            if endpoint is not None and (not isinstance(endpoint, dict) or endpoint.get("type") != "http"):
                raise ConfigError(ONLY_HTTP)
        try:
            checked = _Message.model_validate(message)
        except ValidationError as error:
            raise ConfigError(validation_message(error)) from None
        for endpoint in filter(None, (checked.policy, checked.judge_policy)):
            if endpoint.api_key_env is not None:
                raise ConfigError("api_key_env is for a variable of another machine")
            await self._refuse_own_ports(endpoint)
        try:
            value, _ = codec.parse_bounded(row)
            if not isinstance(value, dict):
                raise ValueError(f"a JSON object is needed, not {type(value).__name__}")
            body = row_json(value)
        except ValueError as error:
            raise DataError(f"row: {error}") from None
        judge = checked.judge_policy
        passed = {
            **checked.model_dump(),
            "policy": endpoint_to_wire(checked.policy),
            "judge_policy": None if judge is None else endpoint_to_wire(judge),
            "environment": checked.environment or self._environment,
        }
        return await self.stack.forward(passed, body)

    async def _refuse_own_ports(self, endpoint: HTTPEndpoint) -> None:
        """Raise `ConfigError` for a URL that leads to a port of the stack: there it could speak as another's agent.

        A name may lead elsewhere by the time that it is called. The gateway therefore refuses its own calls too.
        """
        own: set[int] | None = None
        for url in endpoint.base_urls:
            try:
                where = URL(url)  # as the client reads it
                port = where.port or 0
            except ValueError as error:
                raise ConfigError(f"policy {url!r}: {error}") from None
            if not await _is_here(where.raw_host or "", port):
                continue
            if own is None:
                status = await self.stack.status()
                servers = (each["servers"] for each in status.get("environments", {}).values())
                ports = (server["port"] for group in servers for server in group.values())
                own = {self.server.port, *status.get("ports", ()), *ports}
            if port in own:
                raise ConfigError(f"policy {url}: a port of the stack itself, not of a model's endpoint")

    async def _status(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        return await self.stack.status()


async def _is_here(host: str, port: int) -> bool:
    """Whether a host's name leads to this machine: only to its own addresses can a socket be bound."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
            probe.bind((address[0], 0, *address[2:]))
            return True
    return False


def _digest(overrides: Sequence[Any]) -> str | Sequence[Any]:
    """Return what tells settings of this machine apart, without their values: these may be secrets."""
    return f"sha256:{hashlib.sha256(codec.dumps(overrides)).hexdigest()[:16]}" if overrides else overrides
