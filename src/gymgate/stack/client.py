"""The SDK process's side: one connection to a stack's daemon, and the stack that callers see."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from gymgate import codec
from gymgate.config import CallableEndpoint, Endpoint, RolloutLimits, StackConfig
from gymgate.errors import ConfigError, RolloutTimeoutError, StackLostError
from gymgate.rollout import ModelCall, Rollout
from gymgate.rollout.result import failed_rollout
from gymgate.rollout.row import agent_of, row_json
from gymgate.stack.handover import unpack_calls, unpack_rollout
from gymgate.stack.launch import Place
from gymgate.stack.protocol import PROTOCOL, Peer, Reply
from gymgate.stack.wire import endpoint_to_wire, stack_to_wire

if TYPE_CHECKING:
    from gymgate.gateway import CallableBackend

Progress = Callable[[str], None]
PolicyCallable = Callable[[dict[str, Any]], dict[str, Any] | Awaitable[dict[str, Any]]]
"""Takes a request dict and returns a response dict, or a coroutine of one, in the endpoint's dialect."""
Policy = Endpoint | PolicyCallable

EXIT_TIMEOUT_S = 5.0
"""To wait for the daemon to have stopped everything, when the last lease is given back."""
PING_S, MAX_MISSED = 10.0, 6
"""How often a daemon that owes an answer is asked for a sign of life, and how many it may leave out in turn."""
NOT_PICKLED = "a stack belongs to the process that acquired it; send its config, and acquire it there"
GRACE_S = 1.0
"""Seconds that a rollout's answer may come after its deadline, before its caller stops waiting for the daemon."""
MAX_ID = 256
"""Characters of a rollout's id, which stands in logs and in place of its key."""
_CALLABLE = CallableEndpoint(name="policy")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentInfo:
    """An agent of a stack."""

    environment: str
    instance: str
    """What a row's `agent_ref` names."""
    type: str
    """Its implementation, such as `simple_agent`."""


class Connection:
    """A connection to a daemon and the lease that it is; belongs to the event loop that made it."""

    def __init__(self, place: Place, daemon: subprocess.Popen[bytes] | None) -> None:
        self.daemon = daemon
        """The process at the other end, if this process started it."""
        self.pid = os.getpid()
        self.agents: dict[str, AgentInfo] = {}
        self.gateway_url = ""
        self.progress: list[Progress] = []
        self.callables: dict[str, CallableBackend] = {}
        self.peer = Peer(
            {"policy": self._answer_policy},
            {"progress": self._say},
            on_lost=self._stop_watching,
            describe_loss=place.describe_loss,
        )
        self._shared = False
        self._daemon_pid: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def hello(self, config: StackConfig) -> None:
        """Take the lease; returns when the stack is up and raises why it is not."""
        self._shared = config.share == "machine"
        self._watch(missed=0, heard=self.peer.heard)
        described = await self.peer.call("hello", protocol=PROTOCOL, config=stack_to_wire(config))
        self.agents = {name: AgentInfo(**agent) for name, agent in described["agents"].items()}
        self.gateway_url = described["gateway_url"]
        self._daemon_pid = described["pid"]

    async def goodbye(self) -> bool:
        """Give the lease back; if it was the last, wait (bounded) until the daemon is gone; says whether it was.

        A daemon of this process's own that does not answer counts as one that is to go.
        """
        last = not self._shared
        try:
            async with asyncio.timeout(EXIT_TIMEOUT_S):
                if last := (await self.peer.call("bye"))["last"]:
                    await self.peer.lost.wait()
        except StackLostError:
            return False
        except TimeoutError:
            pass
        finally:
            self._stop_watching()
            self.peer.abort()
        return last

    def drop(self) -> None:
        """End the connection without its event loop, which is closed: the daemon sees the end, and counts the lease no more."""
        self._stop_watching()
        if (sock := self.peer.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def serve(self, name: str, policy: PolicyCallable, endpoint: CallableEndpoint) -> None:
        """Answer the daemon's calls for a callable endpoint."""
        from gymgate.gateway.backends.callable import CallableBackend

        self.callables[name] = CallableBackend(policy, endpoint.dialect, endpoint.timeout_s)

    async def _answer_policy(self, message: dict[str, Any], request: bytes) -> Reply:
        name = message["name"]
        if name not in self.callables:
            known = ", ".join(sorted(self.callables)) or "none"
            raise ConfigError(f"no callable is registered as {name!r} (registered: {known})")
        answer = await self.callables[name].call(codec.loads(request))
        assert answer.raw is not None
        return Reply(None, answer.raw)

    def _watch(self, missed: int, heard: int) -> None:
        """Ask for signs of life while calls wait. Counted rather than timed: this loop too may stand still."""
        if not self.peer.waits or self.peer.heard != heard:
            missed = 0
        if missed > MAX_MISSED:
            self._give_up()
            return
        if self.peer.waits:
            self.peer.tell("ping")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(
            PING_S, self._watch, missed + 1 if self.peer.waits else 0, self.peer.heard
        )

    def _give_up(self) -> None:
        """The daemon hangs: end it if it is ours alone."""
        silence_s = PING_S * MAX_MISSED
        reason = f"the stack's daemon has not answered for {silence_s:g} s"
        if self.daemon is not None and not self._shared:
            self.daemon.kill()
            reason += " and was killed"
        elif self._daemon_pid is not None:
            reason += f"; other processes may use it: if it hangs for good, kill process {self._daemon_pid}"
        self.peer.describe_loss = lambda: reason
        self.peer.abort()

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _say(self, message: dict[str, Any]) -> None:
        line = message["message"]
        for progress in self.progress:
            progress(line)
        if not self.progress and line.startswith("warning: "):
            logger.warning("%s", line.removeprefix("warning: "))


class OpenRoute:
    """A route that is not one rollout's: for clients that call the gateway themselves. Close it."""

    def __init__(
        self, connection: Connection, name: str, described: Mapping[str, str], forget: Callable[[], None]
    ) -> None:
        self._name = name
        self.key = described["key"]
        self.base_url = described["base_url"]
        self.rollout_id = described["rollout_id"]
        self._connection = connection
        self._forget = forget

    async def calls(self) -> list[ModelCall]:
        """The calls so far."""
        found = await self._connection.peer.exchange("route_calls", {"key": self.key})
        return unpack_calls(found.value, found.body)

    async def close(self) -> None:
        """Retire the key; idempotent."""
        try:
            await self._connection.peer.call("close_route", key=self.key)
        finally:
            self._connection.peer.tell("forget_route", name=self._name)  # the call may have been cancelled
            self._forget()

    async def __aenter__(self) -> OpenRoute:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class Stack:
    """A running stack, for the event loop that acquired it. Several may stand for the same one."""

    def __init__(
        self, config: StackConfig, connection: Connection, release: Callable[[], Awaitable[None]]
    ) -> None:
        self.config = config
        self._connection = connection
        self._release = release
        self._closed = False

    @property
    def agents(self) -> dict[str, AgentInfo]:
        """Every agent that rows can go to, by instance name."""
        return self._connection.agents

    @property
    def gateway_url(self) -> str:
        """Where Gym's servers find their policy model."""
        return self._connection.gateway_url

    async def run(
        self,
        row: Mapping[str, Any],
        *,
        policy: Policy,
        environment: str | None = None,
        agent: str | None = None,
        limits: RolloutLimits | None = None,
        rollout_id: str | None = None,
        record_bodies: bool = True,
        judge_policy: Endpoint | None = None,
    ) -> Rollout:
        """Run one row with its own policy endpoint.

        The row goes to `agent`, else to the agent that its `agent_ref` names, else to the default of
        `environment`, which may be left out in a stack of one. A callable gets chat-completions requests;
        `register` one for another dialect. `judge_policy` answers in the policy's place where a judge or a user
        simulator is the policy itself, so that a policy endpoint that records turns sees the agent's alone.
        Cancelling it cancels the rollout.

        A failed rollout comes back as data, `status="failed"`; one whose time is over comes back within about
        `GRACE_S` of its deadline, even if the daemon has stopped. Raises `ConfigError` and `DataError` for what the caller
        got wrong and `StackLostError` if the stack is gone.
        """
        body = row_json(row)
        limits = limits or RolloutLimits()
        agent = agent or agent_of(row)
        message, own = self._message(policy, limits, rollout_id, record_bodies)
        message |= {"environment": environment, "agent": agent}
        if judge_policy is not None:
            message["judge_policy"] = endpoint_to_wire(judge_policy)
        try:
            async with asyncio.timeout(limits.timeout_s + GRACE_S) as deadline:
                reply = await self._peer.exchange("run", message, body)
            return unpack_rollout(reply, row)
        except TimeoutError:
            if not deadline.expired():
                raise
            error = RolloutTimeoutError(
                f"Timed out after {limits.timeout_s:g} s; the stack's daemon did not answer in {GRACE_S:g} s more"
            )
            return failed_rollout(
                error, id=message["rollout_id"], environment=environment or "", agent=agent or ""
            )
        finally:
            self._forget(own)

    async def open_route(
        self,
        policy: Policy,
        *,
        limits: RolloutLimits | None = None,
        rollout_id: str | None = None,
        record_bodies: bool = True,
    ) -> OpenRoute:
        """A route to `policy` for a client of one's own: `base_url` takes any dialect and any API key."""
        message, own = self._message(policy, limits or RolloutLimits(), rollout_id, record_bodies)
        name = secrets.token_hex(8)
        try:
            described = await self._peer.call("open_route", name=name, **message)
        except BaseException:
            self._connection.peer.tell("forget_route", name=name)
            self._forget(own)
            raise
        return OpenRoute(self._connection, name, described, functools.partial(self._forget, own))

    def register(
        self, name: str, policy: PolicyCallable, *, dialect: Literal["chat", "responses"] = "chat"
    ) -> CallableEndpoint:
        """Serve a callable under a name for as long as this connection lives, as policy or as judge."""
        endpoint = CallableEndpoint(name=name, dialect=dialect)
        self._connection.serve(name, policy, endpoint)
        return endpoint

    async def status(self) -> dict[str, Any]:
        """Environments with their servers' pids and ports, rollouts in flight, leases."""
        status: dict[str, Any] = await self._peer.call("status")
        return status

    async def close(self) -> None:
        """Give the lease back; returns when it, if the last, has stopped everything. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._release()

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED)

    @property
    def _peer(self) -> Peer:
        if self._closed:
            raise StackLostError("the stack was closed")
        if self._connection.pid != os.getpid():
            raise StackLostError(
                f"the stack was acquired by process {self._connection.pid}; acquire it again in this one"
            )
        return self._connection.peer

    def _message(
        self, policy: Policy, limits: RolloutLimits, rollout_id: str | None, record_bodies: bool
    ) -> tuple[dict[str, Any], str | None]:
        """What the daemon is told, and the name of the callable that was registered for it."""
        rollout_id = rollout_id or secrets.token_hex(8)
        if len(rollout_id) > MAX_ID or not rollout_id.isprintable():
            raise ConfigError(f"rollout_id {rollout_id[:50]!r} is not up to {MAX_ID} printable characters")
        own = None
        if callable(policy):
            endpoint = _CALLABLE.model_copy(update={"name": f"{rollout_id}-{secrets.token_hex(4)}"})
            self._connection.serve(endpoint.name, policy, endpoint)
            policy, own = endpoint, endpoint.name
        message = {
            "policy": endpoint_to_wire(policy),
            "limits": limits.model_dump(),
            "rollout_id": rollout_id,
            "record_bodies": record_bodies,
        }
        return message, own

    def _forget(self, own: str | None) -> None:
        """Drop a callable that was registered for one rollout or route."""
        if own is not None:
            self._connection.callables.pop(own, None)
