"""One connection of an SDK process to the daemon: its lease, and its calls."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gymgate.core import codec
from gymgate.core.config import CallableEndpoint, Dialect, JudgeEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import PolicyError, StackLostError
from gymgate.core.retrying import Note, unnoted
from gymgate.gateway.backends.base import Backend, BackendAnswer
from gymgate.gateway.server import PreparedEndpoint
from gymgate.stack.daemon import routing
from gymgate.stack.daemon.rollout import RolloutRun
from gymgate.stack.protocol import CallHandler, Peer, Reply, refuse_protocol
from gymgate.stack.wire import endpoint_from_wire

if TYPE_CHECKING:
    from gymgate.stack.daemon.process import Daemon


class LeaseHolder:
    """One connection: the lease of an SDK process on the stack, or none if it only observes."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._judges: dict[str, JudgeEndpoint] = {}
        """The endpoints of judges that this connection said hello with, credentials included. Only its own rollouts use them. Of
        one that joined, those of the stack."""
        self._prepared_judges: Callable[[], dict[str, Any]] = dict
        """Returns them as the first rollout prepared them."""
        self._endpoints: dict[int, Callable[[], Any]] = {}
        """Returns each endpoint that was registered, by its number. The first rollout prepares it, and gets its error."""
        self._environment: str | None = None
        """Where rows go that say nothing else, if this connection joined the stack for one of its environments."""
        handlers: dict[str, CallHandler] = {
            "hello": self.hello,
            "bye": self.bye,
            "run": self.run,
            "status": self.status,
            "report": self.report,
        }
        self.peer = Peer(
            handlers,
            {
                "ping": lambda _: self.peer.tell("pong"),
                "observe": lambda _: daemon.dismiss(self),
                "register": self._register,
                "forget": self._forget,
            },
            on_lost=self.on_lost,
            describe_loss=lambda: "the SDK process is gone",
        )
        self._pidfd: int | None = None

    async def hello(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """Answer when the stack is up, or with the error that it failed with.

        A connection that comes while the stack stops is dropped, so that its process tries again with another daemon.
        """
        if self.daemon.is_retired:
            self.peer.abort()
            raise StackLostError("the stack is stopping")
        self.peer.tell("welcome")  # a caller that heard anything does not try another daemon
        refuse_protocol(message["protocol"])
        self._watch_process()  # before the start, which may take minutes and should end with its process
        config = StackConfig.model_validate(message["config"])
        if config.server is not None:
            return await self._join(config)
        self._use_judges(config)
        running = await self.daemon.started(config)
        return {**running.describe(), "pid": os.getpid()}

    async def _join(self, config: StackConfig) -> dict[str, Any]:
        """Answer if the stack, which others have started, is what the config asks for. Its judges are the stack's."""
        running = await self.daemon.joined(config)
        self._use_judges(running.config)
        description = running.describe(config.environments)
        names = {*description["names"].values()}
        self._environment = names.pop() if len(names) == 1 else None
        return {**description, "pid": None}

    async def bye(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        """Release the lease. Answers whether everything stops now, which nobody can prevent any more."""
        return {"last": self.daemon.release(self)}

    async def run(self, message: dict[str, Any], row: bytes) -> Reply:
        """Run a row and return the record. Its deadline counts from here.

        Raises `ConfigError` and `DataError` for mistakes of the caller; any other failure is in the record.
        """
        started = time.monotonic()  # first: routing a long row takes time of the rollout too
        stack = self.daemon.running
        environment, destination = stack.choose(
            message["environment"] or self._environment,
            message["agent"],
            message.get("environment_server"),
            message.get("taskset"),
        )
        judging, limits = message.get("judge_policy"), RolloutLimits(**message["limits"])
        route = stack.gateway.open(
            self._endpoint(message["policy"]),
            rollout_id=message["rollout_id"],
            judges=self._prepared_judges(),
            judge_policy=None if judging is None else self._endpoint(judging),
            limits=limits,
            policy_servers=destination.policy_servers,
            stand_ins=destination.stand_ins,
            callers=destination.callers,
            record_bodies=message["record_bodies"],
            metadata_routing=destination.strategy in routing.BY_METADATA,
        )
        try:
            if destination.owns_episode:
                body = routing.episode_request(row, key=route.key, taskset=destination.taskset)
            else:
                body = routing.routed_row(
                    row,
                    destination.strategy,
                    key=route.key,
                    base_url=route.base_url,
                    metadata=route.metadata,
                )
            owner = destination.server if destination.owns_episode else None
            run = RolloutRun(
                environment, destination.agent, body, route, limits.timeout_s, started, owner, row
            )
            await run.run(stack)
        finally:
            await route.close()
        return run.packed()

    async def status(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        return {**self.daemon.running.status(), "leases": len(self.daemon.leases)}

    async def report(self, message: dict[str, Any], _: bytes) -> dict[str, Any]:
        return self.daemon.report()

    def on_lost(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._endpoints.clear()  # now, and with them the pools that nobody else uses: the collector may be late
        self._prepared_judges = dict
        self.daemon.release(self)

    def _use_judges(self, config: StackConfig) -> None:
        self._judges = judges = dict(config.models)
        self._prepared_judges = functools.cache(
            lambda: {name: self._prepared(endpoint) for name, endpoint in judges.items()}
        )

    def _register(self, message: dict[str, Any]) -> None:
        """Note an endpoint for the rollouts to come, which name it by its number."""
        endpoint = message["endpoint"]
        self._endpoints[message["number"]] = functools.cache(
            lambda: self._prepared(endpoint_from_wire(endpoint))
        )

    def _forget(self, message: dict[str, Any]) -> None:
        self._endpoints.pop(message["number"], None)

    def _endpoint(self, value: Any) -> Any:
        """Return the endpoint that a rollout gives: the number of one that was registered, or a description."""
        if isinstance(value, int):
            return self._endpoints[value]()
        return self._reachable(endpoint_from_wire(value))

    def _prepared(self, endpoint: JudgeEndpoint) -> JudgeEndpoint | PreparedEndpoint:
        """Return an endpoint as this lease keeps it, with its replicas' state."""
        if isinstance(endpoint, str):
            return endpoint
        return self.daemon.running.gateway.prepare(self._reachable(endpoint))

    def _reachable(self, endpoint: JudgeEndpoint) -> JudgeEndpoint | Backend:
        """Return an endpoint as the gateway takes it: a callable is called over this connection."""
        return _RemoteBackend(self.peer, endpoint) if isinstance(endpoint, CallableEndpoint) else endpoint

    def _watch_process(self) -> None:
        """End the lease with the process that made it, even if a child of it inherited the connection."""
        pid = self.peer.peer_pid
        if pid is None or self._pidfd is not None:  # unknown, or a second hello
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # gone already, or in a namespace where it has no number: the connection will end
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self.peer.abort)


class _RemoteBackend:
    """Sends each call to a Python callable in the SDK process, over its connection. See `Backend`."""

    dialect: Dialect

    def __init__(self, peer: Peer, endpoint: CallableEndpoint) -> None:
        self.dialect = endpoint.dialect
        self._peer = peer
        self._name = endpoint.name

    async def call(
        self,
        body: dict[str, Any],
        *,
        raw: bytes | None = None,
        session: str | None = None,
        note: Note = unnoted,
    ) -> BackendAnswer:
        """See `Backend.call`."""
        request = raw if raw is not None else codec.dumps(body)
        try:
            answer = await self._peer.exchange("policy", {"name": self._name}, request)
        except StackLostError as error:
            raise PolicyError(f"the process that serves {self._name!r} is gone") from error
        try:
            return BackendAnswer(*codec.parse(answer.body))
        except ValueError as error:
            raise PolicyError(
                f"callable {self._name!r} returned a dict that JSON cannot hold: {error}"
            ) from error
