"""One connection of an SDK process to the daemon: its lease, and what it asks for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gymgate.config import CallableEndpoint, RolloutLimits, StackConfig
from gymgate.errors import StackLostError
from gymgate.gateway import Route
from gymgate.stack.handover import pack_calls
from gymgate.stack.protocol import PROTOCOL, Handler, Peer, Reply
from gymgate.stack.remote import RemoteBackend
from gymgate.stack.request import Judge, Request
from gymgate.stack.wire import endpoint_from_wire

if TYPE_CHECKING:
    from gymgate.stack.daemon import Daemon


class Session:
    """One connection of an SDK process."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.leased = False
        self.left = False
        """It said bye."""
        self._models: tuple[tuple[str, Judge], ...] = ()
        """The judges' endpoints that this connection said hello with, credentials included: nobody else's rollouts use them."""
        self._routes: dict[str, tuple[str, Route]] = {}
        """By key, with what the SDK process calls it, which may give it up before it knows the key."""
        self._keys: dict[str, str] = {}
        """By that name."""
        handlers: dict[str, Handler] = {
            "hello": self.hello,
            "bye": self.bye,
            "run": self.run,
            "status": self.status,
            "open_route": self.open_route,
            "route_calls": self.route_calls,
            "close_route": self.close_route,
        }
        self.peer = Peer(
            handlers,
            {"ping": lambda _: self.peer.tell("pong"), "forget_route": self.forget_route},
            on_lost=self.on_lost,
            describe_loss=lambda: "the SDK process is gone",
        )
        self._pidfd: int | None = None

    async def hello(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """Take a lease; answers when the stack is up, or with why it is not.

        Who comes while the stack stops is not welcomed, and so tries again with another daemon.
        """
        if await self.daemon.is_retired():
            self.peer.abort()
            raise StackLostError("the stack is stopping")
        self.peer.tell("welcome")
        if message["protocol"] != PROTOCOL:
            raise StackLostError(
                f"the stack's daemon speaks protocol {PROTOCOL}, this process {message['protocol']}; "
                f"both must run the same gymgate"
            )
        self.leased = True
        self._watch_process()
        config = StackConfig.model_validate(message["config"])
        self._models = config.models
        running = await self.daemon.started(config)
        return {**running.describe(), "pid": os.getpid()}

    async def bye(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """Give the lease back; says whether everything stops now, which nobody prevents any more."""
        self.leased, self.left = False, True
        return {"last": self.daemon.lease_gone() and await self.daemon.decision()}

    async def run(self, message: dict[str, Any], row: bytes) -> Reply:
        return await self.daemon.running.run(self._request(message, row))

    async def status(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        return {**self.daemon.running.status(), "leases": self.daemon.leases}

    async def open_route(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """A route that lives until it is closed or the connection is."""
        route = self.daemon.running.open(self._request(message), metadata_routing=True)
        self._routes[route.key] = message["name"], route
        self._keys[message["name"]] = route.key
        return {"key": route.key, "base_url": route.base_url, "rollout_id": route.rollout_id}

    async def route_calls(self, message: dict[str, Any], _: bytes) -> Reply:
        if (found := self._routes.get(message["key"])) is None:
            raise StackLostError("this connection has no open route of that key")
        return pack_calls({}, found[1])

    async def close_route(self, message: dict[str, Any], _: bytes) -> None:
        if (route := self._take(message["key"])) is not None:
            await route.close()

    def forget_route(self, message: dict[str, Any]) -> None:
        """Close a route that the caller gave up on, whether it ever heard of it or not."""
        if (route := self._take(self._keys.get(message["name"], ""))) is not None:
            self.daemon.close_later(route)

    def on_lost(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        for _, route in self._routes.values():
            self.daemon.close_later(route)
        self.daemon.session_lost(self)

    def _take(self, key: str) -> Route | None:
        """The route of a key, which is this connection's no more."""
        name, route = self._routes.pop(key, ("", None))
        self._keys.pop(name, None)
        return route

    def _request(self, message: Mapping[str, Any], row: bytes = b"") -> Request:
        policy = self._judge(endpoint_from_wire(message["policy"]))
        assert not isinstance(policy, str)
        named = message.get("judge_policy")
        judge_policy = None if named is None else self._judge(endpoint_from_wire(named))
        assert not isinstance(judge_policy, str)
        return Request(
            row=row,
            policy=policy,
            judges={name: self._judge(endpoint) for name, endpoint in self._models},
            judge_policy=judge_policy,
            rollout_id=message["rollout_id"],
            environment=message.get("environment"),
            agent=message.get("agent"),
            limits=RolloutLimits.model_construct(**message["limits"]),
            record_bodies=message["record_bodies"],
        )

    def _judge(self, endpoint: Judge) -> Judge:
        return RemoteBackend(self.peer, endpoint) if isinstance(endpoint, CallableEndpoint) else endpoint

    def _watch_process(self) -> None:
        """End the session with the process that made it, even if a child of it inherited the connection."""
        pid = self.peer.peer_pid
        if pid is None or self._pidfd is not None:
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # gone already, or in a namespace where it has no number: the connection will tell
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self.peer.abort)
