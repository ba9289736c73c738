"""The gateway: the model servers of NeMo Gym's configs, which send each rollout's calls to that rollout's endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self
from weakref import WeakValueDictionary

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from gymgate.core.config import (
    POLICY,
    CallableEndpoint,
    Endpoint,
    HTTPEndpoint,
    JudgeEndpoint,
    ReplayEndpoint,
    RolloutLimits,
)
from gymgate.core.errors import ConfigError
from gymgate.core.http_client import HTTPClient
from gymgate.core.starting import SharedStart
from gymgate.gateway.agent_ports import AgentPorts
from gymgate.gateway.backends.balance import BalancedBackend, ReplicaPool
from gymgate.gateway.backends.base import Backend
from gymgate.gateway.backends.http import HTTPBackend
from gymgate.gateway.handler import PortHandler, StreamTimes
from gymgate.gateway.newcomers import Newcomers
from gymgate.gateway.replay.backend import ReplayBackend
from gymgate.gateway.replay.index import KEPT_INDEXES, stamps_of
from gymgate.gateway.route import POLICY_AS_JUDGE, KeylessRoute, Route, Target
from gymgate.gateway.serving_process import raise_file_limit

# NeMo Gym's client sends again for ever when an idle connection is closed under its request.
KEEPALIVE_S = 3600.0
READ_AHEAD = 1 << 20
"""Bytes of a body that may arrive before it is read. Bodies are read whole, and each pause costs a turn of the loop."""
STOP_TIMEOUT_S = 2.0
"""For answers under way at a port that closes. A stack that stops waits for its gateway for half a second longer."""

logger = logging.getLogger(__name__)
_http_logger = logging.getLogger("gymgate.gateway.http")


def _without_request_line(record: logging.LogRecord) -> bool:
    """Log a malformed request by its class only: its first line can hold a key."""
    if record.exc_info and isinstance(record.exc_info[1], BadHttpMessage):
        record.msg, record.args = "%s", (type(record.exc_info[1]).__name__,)
        record.exc_info = None
    return True


_http_logger.addFilter(_without_request_line)


@dataclass(frozen=True)
class PreparedEndpoint:
    """An endpoint whose address, key and headers have been read and checked. It keeps the state of its replicas."""

    backend: Callable[[], Backend]
    """Returns the backend of one more rollout."""


class Gateway:
    """Listens on loopback, one port per model server that Gym's configs name, for as long as it is entered.

    It belongs to the event loop that entered it. `judges` are the endpoints of model servers other than the policy's,
    for every rollout that does not bring its own and for calls that carry no key. At `sandbox_host`, an address beyond
    loopback, the policy's port answers too, but no call without a key. With `open_to_all` it answers every
    request from that backend, whatever key the request carries.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        sandbox_host: str | None = None,
        judges: Mapping[str, JudgeEndpoint | Backend] | None = None,
        open_to_all: Backend | None = None,
        stream_times: StreamTimes | None = None,
    ) -> None:
        self.host = host
        self.sandbox_host = sandbox_host
        """Another address, at which the policy's port answers requests with a rollout's key."""
        self.stream_times = stream_times or StreamTimes()
        self.routes: dict[bytes, Route] = {}
        """By their key's digest, so that the time of a look-up reveals nothing about existing keys."""
        self.keyless = KeylessRoute({})
        """The calls that carry no rollout's key."""
        self.newcomers = Newcomers()
        self.is_open = open_to_all is not None
        self._open_to_all = open_to_all
        self._judges = dict(judges or {})
        self._ports: dict[str, SharedStart[int]] = {}
        self.all_ports: set[int] = set()
        """Every port of it, those of agent processes included."""
        self._pools: WeakValueDictionary[tuple[str, ...], ReplicaPool] = WeakValueDictionary()
        """By the replicas' addresses: rollouts share the replicas' state even if their endpoints differ otherwise. A pool goes
        with the last prepared endpoint and backend that use it."""
        self.keyless_policy_calls = 0
        """Calls of the policy that were refused because they carried no rollout's key."""
        self._finishing: set[asyncio.Task[None]] = set()
        self._exits = AsyncExitStack()
        self._client = HTTPClient()
        self._port = port
        """The policy model's; 0 until it listens takes a free one."""

    async def __aenter__(self) -> Self:
        raise_file_limit()
        async with AsyncExitStack() as exits:
            await exits.enter_async_context(self._client)
            self._exits = exits  # ports that listen before the end of this block are closed if it fails
            keyless = {
                name: None
                if judge == "none"
                else Target(self._backend(judge, has_deadline=False), memory=None)
                for name, judge in self._judges.items()
            }
            if self._open_to_all is not None:
                keyless[POLICY] = Target(self._open_to_all, memory=None)
            self.keyless = KeylessRoute(keyless)
            self._port = await self.port_for(POLICY)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for listening in self._ports.values():  # first: none may begin to listen after the exits below
            await listening.stop()
        await asyncio.gather(*(route.close() for route in (*self.routes.values(), self.keyless)))
        await asyncio.gather(*self._finishing)
        await self._exits.aclose()

    @property
    def port(self) -> int:
        """The policy model's port."""
        return self._port

    @property
    def url(self) -> str:
        """The policy model's URL, without a path."""
        return f"http://{self.host}:{self._port}"

    @property
    def in_flight(self) -> dict[str, int]:
        """Calls that have no answer yet, by model server, over all rollouts."""
        counts: Counter[str] = Counter()
        for route in self.routes.values():
            counts.update(route.in_flight)
        return dict(counts)

    @property
    def replicas(self) -> dict[str, dict[str, Any]]:
        """The state of each replica, by address."""
        return {url: state for pool in self._pools.values() for url, state in pool.describe().items()}

    async def port_for(self, model_server: str) -> int:
        """Return the port of a model server by its Gym instance name, after listening on it if nobody did yet."""
        if model_server not in self._ports:
            self._ports[model_server] = SharedStart(lambda: self._listen(model_server))
        return await self._ports[model_server].get()

    def agent_ports(self) -> AgentPorts:
        """Return ports for one process of an agent that cannot forward the rollout's key."""
        return AgentPorts(self._listen)

    def prepare(self, endpoint: JudgeEndpoint | Backend, *, has_deadline: bool = True) -> PreparedEndpoint:
        """Return what an endpoint's rollouts have in common. Raises `ConfigError` if it cannot be used.

        `has_deadline`: its calls are a rollout's, whose end cancels them.
        """
        if isinstance(endpoint, str):
            raise ConfigError(f"{endpoint!r} is not an endpoint here: calls without a key have no policy")
        if isinstance(endpoint, ReplayEndpoint):
            files, index = endpoint.rollouts, endpoint.index
            return PreparedEndpoint(lambda: _replay(files, index, stamps_of(files)))
        if isinstance(endpoint, CallableEndpoint):
            raise ConfigError(
                f"callable {endpoint.name!r} can be called only through the process that registered it"
            )
        if not isinstance(endpoint, HTTPEndpoint):
            return PreparedEndpoint(lambda: endpoint)
        rate_limit_s = math.inf if has_deadline else endpoint.timeout_s
        if not endpoint.replicas:
            return PreparedEndpoint(
                HTTPBackend(endpoint, self._client, rate_limit_s=rate_limit_s).for_rollout
            )
        if (pool := self._pools.get(endpoint.base_urls)) is None:
            self._pools[endpoint.base_urls] = pool = ReplicaPool(endpoint.base_urls, self._client)
        return PreparedEndpoint(BalancedBackend(endpoint, pool, rate_limit_s=rate_limit_s).for_rollout)

    def open(
        self,
        endpoint: Endpoint | Backend | PreparedEndpoint,
        *,
        rollout_id: str | None = None,
        judges: Mapping[str, JudgeEndpoint | Backend | PreparedEndpoint] | None = None,
        judge_policy: Endpoint | Backend | PreparedEndpoint | None = None,
        limits: RolloutLimits | None = None,
        policy_servers: Collection[str] = (),
        stand_ins: Collection[str] = (),
        callers: Mapping[str, str] | None = None,
        record_bodies: bool = True,
        metadata_routing: bool = False,
    ) -> Route:
        """Open a route for one rollout, until its `close`.

        `judges` maps other model servers' instance names to endpoints; `"policy"` is `endpoint`, `"none"` refuses its
        calls, and the name `"*"` stands for every one not named. `judge_policy` answers in `endpoint`'s place where
        a judge is the policy. `policy_servers` are the model servers, besides the usual one, that the rollout's agent has for its
        policy: their calls are the policy's, and go to `endpoint` unless `judges` gives one. `stand_ins` are model servers that
        stand for the policy's, each with conversations of its own: those among `policy_servers` are the policy, others answer
        as judges that are the policy do. `callers` maps model servers to the one agent that calls each. Raises `ConfigError` if
        an endpoint cannot be used.
        """
        policy = self._backend(endpoint)
        judging = policy if judge_policy is None else self._backend(judge_policy)
        targets: dict[str, Target | None] = {POLICY: Target(policy), POLICY_AS_JUDGE: Target(judging)}
        targets |= {name: Target(policy if name in policy_servers else judging) for name in stand_ins}
        for name, judge in {**self._judges, **(judges or {})}.items():
            if name not in policy_servers or judge != "policy":
                backend = judging if judge == "policy" else None if judge == "none" else self._backend(judge)
                targets[name] = None if backend is None else Target(backend)
        route = Route(
            targets,
            base_url=self.url,
            rollout_id=rollout_id,
            limits=limits,
            policy_servers=policy_servers,
            callers=callers,
            record_bodies=record_bodies,
            metadata_routing=metadata_routing,
            on_close=self._retire,
            on_end=self._finish_sessions,
        )
        self.routes[_digest(route.key)] = route  # last: whatever raises above leaves no key
        return route

    def find(self, key: str) -> Route | None:
        """Return the rollout of a key, if it is live."""
        return self.routes.get(_digest(key))

    def _retire(self, route: Route) -> None:
        self.routes.pop(_digest(route.key), None)

    def _finish_sessions(self, route: Route) -> None:
        """Tell the rollout's endpoints that its conversations are over; nobody waits for that but the gateway's own end."""
        for backend in route.backends:
            if (finish := getattr(backend, "finish_sessions", None)) is not None:
                task = asyncio.create_task(finish())
                self._finishing.add(task)
                task.add_done_callback(self._finishing.discard)

    def _backend(
        self, endpoint: JudgeEndpoint | Backend | PreparedEndpoint, *, has_deadline: bool = True
    ) -> Backend:
        if not isinstance(endpoint, PreparedEndpoint):
            endpoint = self.prepare(endpoint, has_deadline=has_deadline)
        return endpoint.backend()

    async def _listen(self, model_server: str, agent_ports: AgentPorts | None = None) -> int:
        loop = asyncio.get_running_loop()
        is_policy = model_server == POLICY and agent_ports is None
        server = _Server(PortHandler(self, model_server, agent_ports))
        # All of a stack's rollouts may connect at once; the default of 100 would drop some for a second.
        listener = await loop.create_server(server, self.host, self._port if is_policy else 0, backlog=4096)
        self._exits.push_async_callback(_stop, listener, server)
        bound: int = listener.sockets[0].getsockname()[1]
        self.all_ports.add(bound)
        logger.info("gateway: %s listens on %s:%d", model_server, self.host, bound)
        if is_policy and self.sandbox_host is not None:
            keyed = _Server(PortHandler(self, model_server, key_required=True))
            try:
                outer = await loop.create_server(keyed, self.sandbox_host, bound, backlog=4096)
            except OSError as error:
                raise ConfigError(
                    f"the gateway cannot listen on {self.sandbox_host} port {bound}: {error.strerror}; give an address of "
                    "this machine as gateway_host (--gateway-host)"
                ) from error
            self._exits.push_async_callback(_stop, outer, keyed)
        return bound


class _Server(web.Server):
    """Answers at one port, and lets the gateway know of each connection."""

    def __init__(self, handler: PortHandler) -> None:
        super().__init__(
            handler,
            access_log=None,
            auto_decompress=False,
            logger=_http_logger,
            keepalive_timeout=KEEPALIVE_S,
            read_bufsize=READ_AHEAD,
        )
        self._newcomers = handler.gateway.newcomers

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._newcomers.add(handler)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._newcomers.remove(handler)


@lru_cache(maxsize=KEPT_INDEXES)
def _replay(paths: tuple[str, ...], index: int | None, stamps: tuple[tuple[int, int], ...]) -> ReplayBackend:
    """One backend while the files do not change: a new one reads its index in a thread at its first call."""
    return ReplayBackend(paths, index)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()


async def _stop(listener: asyncio.Server, server: web.Server) -> None:
    listener.close()
    server.pre_shutdown()
    await server.shutdown(STOP_TIMEOUT_S)
