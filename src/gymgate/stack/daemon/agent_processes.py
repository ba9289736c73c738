"""Agent processes: each serves one rollout of an agent that cannot forward the rollout key.

An agent process has gateway ports of its own. A call that arrives there belongs to the rollout that holds the process.
Its server is killed when the rollout ends, because a late call would count as the next rollout's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from gymgate.core.errors import GymgateError, ServerDiedError, StackLostError
from gymgate.gateway.agent_ports import AgentPorts
from gymgate.gateway.route import Route
from gymgate.stack.daemon import children
from gymgate.stack.daemon.children import Child
from gymgate.stack.ports import HeldPort

END_TIMEOUT_S = 10.0
"""For a killed server to be gone. One that the kernel holds back (a dead network mount) is left behind with its ports."""

logger = logging.getLogger(__name__)


class AgentProcess:
    """Serves one rollout at a time, each in a new server. `error` is set, and `rollouts` cancelled, when that dies in use."""

    def __init__(self, number: int, gateway_ports: AgentPorts) -> None:
        self.number = number
        self.gateway_ports = gateway_ports
        self.held = HeldPort()
        self.server: Child | None = None
        self.rollouts: set[asyncio.Task[Any]] = set()
        """The rollout that holds it, and when it began (Unix time)."""
        self.error: ServerDiedError | None = None
        self.left_behind = False
        """Whether its last server could not be ended and may still call its gateway ports."""

    @property
    def port(self) -> int:
        return self.held.number

    @property
    def alive(self) -> bool:
        return self.server is not None and self.server.alive

    def adopt(self, server: Child, environment: str) -> None:
        """Use this server from now on; at once when it was forked, so that it is ended however its start ends."""
        self.server = server
        self.error = None
        server.exited.add_done_callback(lambda _: self._fail_users(server, environment))

    async def end(self, grace_s: float = 0.0) -> None:
        """End its server and everything that this started. Waits up to `END_TIMEOUT_S` until it is gone."""
        if (server := self.server) is not None:
            await children.end([server], grace_s)
            await asyncio.wait([server.exited], timeout=END_TIMEOUT_S)
            # Not before: a caller that is cancelled leaves it to the next one to wait.
            self.left_behind, self.server = server.alive, None

    def _fail_users(self, server: Child, environment: str) -> None:
        if self.rollouts:
            self.error = server.exit_error(environment)
            logger.warning("%s", self.error)
            for task in self.rollouts:
                task.cancel()


class AgentProcessPool:
    """The processes of one agent, leased in the order of asking. One server is kept ready, others start when needed."""

    def __init__(
        self,
        environment: str,
        size: int,
        gateway_ports: Callable[[], AgentPorts],
        start: Callable[[AgentProcess], Awaitable[None]],
    ) -> None:
        """`start` lets a process adopt a new server, and returns when that listens."""
        self.all = [AgentProcess(number, gateway_ports()) for number in range(1, size + 1)]
        self._gateway_ports = gateway_ports
        self._environment = environment
        self._start = start
        self._free = asyncio.Semaphore(size)  # which wakes in the order of asking
        self._idle = list(reversed(self.all))
        """Free processes; those with a live server come last."""
        self._waiting = 0
        self._settling: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def start(self) -> None:
        """Start the first server, so that an agent that cannot start fails now. Raises `StackStartError`."""
        await self._run(self._idle[-1])

    @contextlib.asynccontextmanager
    async def lease(self, route: Route) -> AsyncIterator[AgentProcess]:
        """Wait for a process, and hold it: its model calls go to `route`. Raises `StackStartError` if it does not start."""
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        process = self._idle.pop()
        try:
            if process.left_behind:
                process = self._replace(process)
            if not process.alive:
                await self._run(process)
            process.gateway_ports.route = route
            yield process
        finally:
            process.gateway_ports.route = None  # first: a late call of its server belongs to nobody
            task = asyncio.create_task(self._settle(process))  # not awaited: the rollout's time may be over
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def stop(self, grace_s: float) -> None:
        """End every server and release the ports. Idempotent."""
        self._stopped = True
        for task in self._settling:
            task.cancel()
        await asyncio.gather(*(process.end(grace_s) for process in self.all))
        for process in self.all:
            process.held.close()

    def servers(self) -> Iterator[tuple[Child, int, bool]]:
        """Yield each live server with its port, and whether its rollout waits for it and not for a model."""
        for process in self.all:
            if process.server is not None and process.alive:
                route = process.gateway_ports.route
                yield process.server, process.port, bool(process.rollouts) and not (route and route.in_flight)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Return the servers, as `Stack.status` shows them."""
        return {
            server.name: {"pid": server.pid, "port": process.port, "alive": server.alive}
            for process in self.all
            if (server := process.server) is not None
        }

    async def _run(self, process: AgentProcess) -> None:
        if self._stopped:
            raise StackLostError("the stack is stopping")
        try:
            await self._start(process)
        except BaseException:
            await asyncio.shield(process.end())
            raise

    async def _settle(self, process: AgentProcess) -> None:
        """End a rollout's server, then pass the process on whatever happens: others wait for it."""
        try:
            await process.end()
            if not process.left_behind and not self._waiting and not any(other.alive for other in self._idle):
                await self._run(process)
        except (GymgateError, OSError) as error:
            # The next rollout tries again, and gets the error.
            logger.warning("%s: %s", self._environment, error)
        finally:
            self._idle.insert(len(self._idle) if process.alive else 0, process)
            self._free.release()

    def _replace(self, process: AgentProcess) -> AgentProcess:
        """Return a process with new ports in place of one whose server was left behind."""
        name, number = self._environment, process.number
        logger.warning("%s: agent process %d is still there after %g s", name, number, END_TIMEOUT_S)
        self.all[number - 1] = new = AgentProcess(number, self._gateway_ports())
        process.held.close()  # its server may still listen there
        return new
