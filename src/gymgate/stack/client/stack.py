"""The SDK process's side: one connection to a stack's daemon, and the stack that callers see."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from gymgate.core import codec
from gymgate.core.addresses import without_login
from gymgate.core.config import (
    CallableEndpoint,
    Endpoint,
    HTTPEndpoint,
    ReplayEndpoint,
    RolloutLimits,
    StackConfig,
)
from gymgate.core.errors import ConfigError, RolloutTimeoutError, StackLostError, printable
from gymgate.core.starting import SharedStart
from gymgate.gateway.backends.base import PolicyCallable
from gymgate.gym.runtime.command import Progress
from gymgate.rollouts import Rollout
from gymgate.rollouts.result import failed_rollout
from gymgate.rollouts.row_fields import sent_row
from gymgate.stack.client.endpoints import RegisteredEndpoints
from gymgate.stack.protocol import PROTOCOL, Peer, Reply
from gymgate.stack.wire import endpoint_to_wire, stack_to_wire, unpack_rollout

if TYPE_CHECKING:
    from gymgate.gateway.backends.callable import CallableBackend

Policy = Endpoint | PolicyCallable

EXIT_TIMEOUT_S = 5.0
"""For the daemon to stop everything, when the last lease is given back."""
PING_S, MAX_MISSED = 10.0, 5
"""How often a daemon that owes an answer is asked for a sign of life, and how many it may miss in a row. Together with the
time until the first one, it is given up within a minute."""
NOT_PICKLED = "a stack belongs to the process that acquired it; send its config, and acquire it there"
GRACE_S = 1.0
"""Seconds after a rollout's deadline for which its caller still waits for the daemon."""
MAX_ID = 256
"""Characters of a rollout's id, which appears in logs and in place of its key."""

logger = logging.getLogger(__name__)


def checked_policy(policy: Any) -> Any:
    """Return the policy. Raises `ConfigError` for what is neither a function nor an endpoint."""
    if isinstance(policy, str) and "://" in policy:
        url = without_login(policy)
        raise ConfigError(f"policy {url!r} is a string; write policy=HTTPEndpoint(base_url={url!r})")
    if not (callable(policy) or isinstance(policy, HTTPEndpoint | ReplayEndpoint | CallableEndpoint)):
        raise ConfigError(
            f"policy must be a function, an HTTPEndpoint or a ReplayEndpoint, not {type(policy).__name__}"
        )
    return policy


def checked_id(rollout_id: str) -> str:
    """Return the id. Raises `ConfigError` for one that cannot be shown."""
    if len(rollout_id) > MAX_ID or not rollout_id.isprintable():
        raise ConfigError(f"rollout_id {rollout_id[:50]!r} is not up to {MAX_ID} printable characters")
    return rollout_id


@dataclass(frozen=True)
class AgentInfo:
    """An agent of a stack."""

    environment: str
    instance: str
    """The name in a row's `agent_ref`."""
    type: str
    """Its implementation, such as `simple_agent`."""
    untrainable: str | None = None
    """Why its rollouts cannot be trained on: an environment server plays the policy with several agents. Names the setting."""


class Lease:
    """A connection to a daemon, which is a lease. Belongs to the event loop that made it."""

    def __init__(self, describe_loss: Callable[[], str], daemon: subprocess.Popen[bytes] | None) -> None:
        self.daemon = daemon
        """The process at the other end, if this process started it."""
        self.pid = os.getpid()
        self.agents: dict[str, AgentInfo] = {}
        self.description: dict[str, Any] = {}
        """What the daemon says of its stack once it is up; see `RunningStack.describe`."""
        self.progress: Progress | None = None
        self.loop = asyncio.get_running_loop()
        self.callables: dict[str, CallableBackend] = {}
        self.peer = Peer(
            {"policy": self._answer_policy},
            {"progress": self._on_progress, "stopped": self._on_stopped},
            on_lost=self._stop_watching,
            describe_loss=describe_loss,
        )
        self.endpoints = RegisteredEndpoints(self.peer.tell)
        self._shared = False
        self._daemon_pid: int | None = None
        """`None` also if it may be a process of another machine."""
        self._timer: asyncio.TimerHandle | None = None

    async def hello(self, config: StackConfig) -> None:
        """Take the lease. Returns when the stack is up; raises the error that it failed with."""
        self._shared = config.share == "machine"
        self._watch(missed=0, heard=self.peer.heard)
        wire = stack_to_wire(config)
        self.description = description = await self.peer.call("hello", protocol=PROTOCOL, config=wire)
        self.agents = {name: AgentInfo(**agent) for name, agent in description["agents"].items()}
        self._daemon_pid = description["pid"]

    async def goodbye(self) -> bool:
        """Release the lease. If it was the last one, wait (bounded) until the daemon is gone. Returns whether it was.

        A daemon of this process alone that does not answer counts as one that should go.
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
        """End the connection although its event loop is closed. The daemon sees the end and drops the lease."""
        self._stop_watching()
        if (sock := self.peer.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    async def _answer_policy(self, message: dict[str, Any], request: bytes) -> Reply:
        name = message["name"]
        if name not in self.callables:
            names = ", ".join(sorted(self.callables)) or "none"
            raise ConfigError(f"no callable is registered as {name!r} (registered: {names})")
        answer = await self.callables[name].call(codec.loads_own(request))
        assert answer.raw is not None
        return Reply(None, answer.raw)

    def _watch(self, missed: int, heard: int) -> None:
        """Ask for signs of life while calls wait. They are counted, not timed, because this loop may stall as well."""
        if not self.peer.waits or self.peer.heard != heard:
            missed = 0
        if missed >= MAX_MISSED:
            self._give_up()
            return
        if self.peer.waits:
            self.peer.tell("ping")
            missed += 1
        self._timer = asyncio.get_running_loop().call_later(PING_S, self._watch, missed, self.peer.heard)

    def _give_up(self) -> None:
        """The daemon hangs. Kill it if only this process uses it."""
        reason = f"the stack's daemon has not answered for {PING_S * MAX_MISSED:g} s"
        if self.daemon is not None and not self._shared:
            self.daemon.kill()
            reason += " and was killed"
        elif self._daemon_pid is not None:
            reason += f"; other processes may use it: if it does not recover, gymgate stop {self._daemon_pid}"
        self.peer.describe_loss = lambda: reason
        self.peer.abort()

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_progress(self, message: dict[str, Any]) -> None:
        line = printable(message["message"])
        if self.progress is not None:
            self.progress(line)
        elif line.startswith("warning: "):
            logger.warning("%s", line.removeprefix("warning: "))

    def _on_stopped(self, message: dict[str, Any]) -> None:
        """Remember why the daemon will be gone in a moment."""
        describe, reason = self.peer.describe_loss, message["reason"]
        self.peer.describe_loss = lambda: f"{describe()}; {reason}"


class Stack:
    """A running stack, for the event loop that acquired it. Several objects may refer to the same running stack."""

    def __init__(
        self,
        config: StackConfig,
        take: Callable[[], Coroutine[Any, Any, Lease]],
        release: Callable[[Lease], Awaitable[None]],
        *,
        reconnect: bool = False,
    ) -> None:
        self.config = config
        self._pid = os.getpid()
        self._take = take
        self._release = release
        self._reconnect = reconnect
        self._leasing = SharedStart(self._take_lease, lambda lease: not lease.peer.lost.is_set())
        self._lease: Lease | None = None
        """The latest, perhaps lost."""
        self._callables: dict[str, CallableBackend] = {}
        self._closed = False

    @classmethod
    async def _open(
        cls,
        config: StackConfig,
        take: Callable[[], Coroutine[Any, Any, Lease]],
        release: Callable[[Lease], Awaitable[None]],
        *,
        reconnect: bool,
    ) -> Self:
        """Return a stack with its lease taken. Raises what keeps the stack from starting."""
        stack = cls(config, take, release, reconnect=reconnect)
        try:
            await stack._leasing.get()
        except BaseException:
            await stack.close()
            raise
        return stack

    @property
    def agents(self) -> dict[str, AgentInfo]:
        """Every agent that rows can go to, by instance name."""
        return self._last.agents

    @property
    def description(self) -> Mapping[str, Any]:
        """What the stack said of itself when it was up; see `RunningStack.describe`."""
        return self._last.description

    @property
    def gateway_url(self) -> str:
        """The URL of the policy model for Gym's servers."""
        url: str = self.description["gateway_url"]
        return url

    @property
    def names(self) -> Mapping[str, str]:
        """The name of each environment in rollouts, by its name or path in the config."""
        names: dict[str, str] = self.description["names"]
        return names

    def refuse_training(self, environment: str | None = None) -> None:
        """Raise `ConfigError`, with the setting that helps, if the policy of an environment, or of any, is several agents of one
        rollout and its config does not say which one is trained.
        """
        name = None if environment is None else self.names.get(environment, environment)
        for about in self.agents.values():
            if about.untrainable is not None and name in (None, about.environment):
                raise ConfigError(f"cannot train: {about.untrainable}")

    async def run(
        self,
        row: Mapping[str, Any],
        *,
        policy: Policy,
        environment: str | None = None,
        agent: str | None = None,
        limits: RolloutLimits | None = None,
        rollout_id: str | None = None,
        record_bodies: bool = False,
        judge_policy: Policy | None = None,
    ) -> Rollout:
        """Run one row with its own policy endpoint.

        The row goes to `agent`, else to what it names (an environment server in `_ng_environment_server`, or an agent in
        `agent_ref`), else to the environment server of its materialised taskset, else to the default of `environment`, which
        may be left out in a stack of one. A callable gets chat-completions requests;
        `register` one for another dialect. `judge_policy` answers in the policy's place where a judge or a user
        simulator is the policy itself, so that a policy endpoint that records turns sees only the agent's.
        Cancelling it cancels the rollout.

        A failed rollout comes back as data, `status="failed"`. One that is out of time comes back about a
        second after its deadline, even if the daemon has stopped. Raises `ConfigError` and `DataError` for mistakes of
        the caller, and `StackLostError` if the stack is gone.
        """
        sent = sent_row(row)
        limits = limits or RolloutLimits()
        owner = None if agent else sent.environment_server
        agent = agent or sent.agent
        rollout_id = checked_id(rollout_id or secrets.token_hex(8))
        policies = {"policy": checked_policy(policy)}
        if judge_policy is not None:
            policies["judge_policy"] = checked_policy(judge_policy)
        lease: Lease | None = None
        with contextlib.ExitStack() as in_use:
            message = {
                "limits": limits.model_dump(),
                "rollout_id": rollout_id,
                "record_bodies": record_bodies,
                "environment": environment,
                "agent": agent,
                "environment_server": owner,
                "taskset": sent.taskset,
            }
            try:
                async with asyncio.timeout(limits.timeout_s + GRACE_S) as deadline:
                    lease = await self._current_lease()
                    for role, model in policies.items():
                        message[role] = self._endpoint(lease, model, rollout_id, in_use)
                    reply = await lease.peer.exchange("run", message, sent.body)
                return unpack_rollout(reply)
            except TimeoutError:
                if not deadline.expired():
                    raise
                waited = f"the stack's daemon did not answer in {GRACE_S:g} s more"
                if lease is None:
                    waited = "the stack, which was lost, was not up again"
                error = RolloutTimeoutError(f"Timed out after {limits.timeout_s:g} s; {waited}")
                name = self.names.get(environment or "", environment or "")
                return failed_rollout(error, id=rollout_id, environment=name, agent=agent or "")

    def register(
        self, name: str, policy: PolicyCallable, *, dialect: Literal["chat", "responses"] = "chat"
    ) -> CallableEndpoint:
        """Serve a callable under a name, as policy or as judge, until `unregister` or `close`."""
        from gymgate.gateway.backends.callable import CallableBackend

        endpoint = CallableEndpoint(name=name, dialect=dialect)
        self._callables[name] = CallableBackend(policy, endpoint.dialect, endpoint.timeout_s)
        return endpoint

    def unregister(self, name: str) -> None:
        """Stop serving a callable that `register` was given; calls under way go on. Idempotent."""
        self._callables.pop(name, None)

    async def status(self) -> dict[str, Any]:
        """Return the environments with their servers' pids and ports, the rollouts in flight, and the leases."""
        lease = await self._current_lease()
        status: dict[str, Any] = await lease.peer.call("status")
        return status

    async def close(self) -> None:
        """Release the lease. If it is the last one, return when everything has stopped. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # A cancelled caller waits all the same: a lease that is not given back keeps the daemon up.
        closing = asyncio.ensure_future(self._give_back())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED)

    async def _take_lease(self) -> Lease:
        if self._lease is not None:
            # A lost one: its daemon may be a child of this process that nobody has waited for.
            await self._release(self._lease)
        self._lease = await self._take()
        self._lease.callables = self._callables
        return self._lease

    async def _give_back(self) -> None:
        if (lease := await self._leasing.stop()) is not None:
            await self._release(lease)

    async def _current_lease(self) -> Lease:
        """Return the lease. A lost one is replaced if this stack reconnects."""
        if self._closed:
            raise StackLostError("the stack was closed; acquire it again")
        if self._pid != os.getpid():
            raise StackLostError(
                f"the stack was acquired by process {self._pid}; acquire it again in this one"
            )
        return await self._leasing.get() if self._reconnect else self._last

    @property
    def _last(self) -> Lease:
        assert self._lease is not None, "_open has returned"
        return self._lease

    def _endpoint(
        self, lease: Lease, policy: Policy, rollout_id: str, in_use: contextlib.ExitStack
    ) -> dict[str, Any] | str | int:
        """Return an endpoint for the wire. Its number, or a callable's name, is valid until `in_use` is left."""
        if isinstance(policy, HTTPEndpoint):
            return in_use.enter_context(lease.endpoints.number_of(policy))
        if callable(policy):
            name = f"{rollout_id}-{secrets.token_hex(4)}"
            policy = self.register(name, policy)
            in_use.callback(self.unregister, name)
        return endpoint_to_wire(policy)
