"""A stack of this machine, served to callers on others. What they ask is checked here, and then passed on to the daemon.

A caller with the token can run rows, in the stack's environments, with policies at HTTP endpoints, and see the status. It
can name no file, no variable and no setting of this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationError

from gymgate.core import codec
from gymgate.core.config import Config, HTTPEndpoint, RolloutLimits, StackConfig, validation_message
from gymgate.core.errors import ConfigError, DataError, StackLostError
from gymgate.core.http_client import MAX_BODY, is_loopback
from gymgate.gym.runtime.command import Progress
from gymgate.rollouts.row_fields import row_json
from gymgate.stack.client import Stack, checked_id
from gymgate.stack.leases import connect
from gymgate.stack.network import (
    ACCEPTED,
    HANDSHAKE_S,
    MAX_LINE,
    FirstLine,
    notice_silence,
    refuse_settings,
)
from gymgate.stack.protocol import PROTOCOL, Peer, Reply
from gymgate.stack.wire import endpoint_to_wire

MIN_TOKEN = 16
MAX_FRAME = 2 * MAX_BODY
"""Bytes of one message of a caller, a row included, of which no model call can hold more than `MAX_BODY`."""
ONLY_HTTP = "a stack of another machine runs policies at HTTP endpoints only (no callables, recordings or token engines)"


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
    if not MIN_TOKEN <= len(token.encode()) <= MAX_LINE or not token.isprintable():
        raise ConfigError(f"the token must have {MIN_TOKEN} to {MAX_LINE} printable characters")
    if context is None and not is_loopback(address := listener.getsockname()[0]):
        raise ConfigError(f"{address} is not loopback, so it needs TLS: --certificate FILE --key FILE")
    stack = await connect(config, progress=progress, reconnect=True)
    peers: set[Peer] = set()

    def admit(transport: asyncio.Transport, line: bytes | None) -> Peer | None:
        accepted = hmac.compare_digest(line or b"", token.encode())
        transport.write((ACCEPTED if accepted else b"refused") + b"\n")
        if not accepted:
            return None
        notice_silence(transport.get_extra_info("socket"))
        peer = _Caller(stack, lambda: peers.discard(peer)).peer
        peers.add(peer)
        return peer

    tls: dict[str, Any] = {} if context is None else {"ssl": context, "ssl_handshake_timeout": HANDSHAKE_S}
    loop = asyncio.get_running_loop()
    try:
        with contextlib.closing(await loop.create_server(lambda: FirstLine(admit), sock=listener, **tls)):
            ready()
            await asyncio.Event().wait()
    finally:
        for peer in [*peers]:
            peer.abort()
        await stack.close()


class _Message(Config):
    """What a caller says of a rollout."""

    policy: HTTPEndpoint
    judge_policy: HTTPEndpoint | None
    limits: RolloutLimits
    rollout_id: Annotated[str, AfterValidator(checked_id)]
    record_bodies: bool
    environment: str | None
    agent: str | None


class _Caller:
    """One connection of a process on another machine. Its rollouts end with it."""

    def __init__(self, stack: Stack, on_lost: Callable[[], None]) -> None:
        self.stack = stack
        self._environment: str | None = None
        """The only environment that it asked for, if it is one."""
        self.peer = Peer(
            {"hello": self._hello, "bye": self._bye, "run": self._run, "status": self._status},
            {"ping": self._pong},
            on_lost=on_lost,
            describe_loss=lambda: "the caller is gone",
            max_frame=MAX_FRAME,
        )

    async def _hello(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """Answer if the caller asks for nothing but environments of the stack."""
        if message["protocol"] != PROTOCOL:
            raise StackLostError(
                f"the stack's server speaks protocol {PROTOCOL}, this process {message['protocol']}; "
                f"both must run the same gymgate"
            )
        try:
            config = StackConfig.model_validate(message["config"])
        except ValidationError as error:
            raise ConfigError(validation_message(error)) from None
        refuse_settings(config)
        described = self.stack.described
        served = {**{name: name for name in described["names"].values()}, **described["names"]}
        asked = {environment.name for environment in config.environments}
        if unknown := asked - served.keys():
            raise ConfigError(
                f"environment {min(unknown)!r} is not served here; there is {', '.join(sorted(served))}"
            )
        self._environment = min(asked) if len(asked) == 1 else None
        names = {name: served[name] for name in asked}
        of_all = described["settings"]
        environments = [
            {**each, "overrides": _digest(each["overrides"])}
            for each in of_all["environments"]
            if each["name"] in names.values()
        ]
        return {
            **described,
            "names": names,
            "settings": {**of_all, "environments": environments},
            "pid": None,
        }

    def _pong(self, _: dict[str, Any]) -> None:
        if self.peer.writable:  # else a caller that never reads fills the memory
            self.peer.tell("pong")

    async def _bye(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        return {"last": False}

    async def _run(self, message: dict[str, Any], row: bytes) -> Reply:
        """Run a row. Only what is checked here reaches the daemon, which trusts its callers."""
        endpoints = [message[name] for name in ("policy", "judge_policy") if message[name] is not None]
        if any(not isinstance(endpoint, dict) or endpoint.get("type") != "http" for endpoint in endpoints):
            raise ConfigError(ONLY_HTTP)
        try:
            asked = _Message.model_validate(message)
        except ValidationError as error:
            raise ConfigError(validation_message(error)) from None
        judge = asked.judge_policy
        if any(
            endpoint is not None and endpoint.api_key_env is not None for endpoint in (asked.policy, judge)
        ):
            raise ConfigError("api_key_env is for a variable of another machine")
        try:
            body = row_json(codec.loads_object(row))
        except ValueError as error:
            raise DataError(f"row: {error}") from None
        checked = {
            **asked.model_dump(),
            "policy": endpoint_to_wire(asked.policy),
            "judge_policy": None if judge is None else endpoint_to_wire(judge),
            "environment": asked.environment or self._environment,
        }
        return await self.stack.forward(checked, body)

    async def _status(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        return await self.stack.status()


def _digest(overrides: Sequence[Any]) -> str | Sequence[Any]:
    """Return what tells settings of this machine apart, without their values: these may be secrets."""
    return f"sha256:{hashlib.sha256(codec.dumps(overrides)).hexdigest()[:16]}" if overrides else overrides
