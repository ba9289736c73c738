"""Agent processes: each serves one rollout of an agent that cannot forward the rollout key.

An agent process has gateway ports of its own. A call that arrives there belongs to the rollout that holds the process.
The server is killed when the rollout ends, because a late call would count as the next rollout's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from gymgate.errors import GymgateError, ServerDiedError, StackLostError
from gymgate.gateway import AgentPorts, Route
from gymgate.stack import servers
from gymgate.stack.forkserver_client import Child, ForkServerClient
from gymgate.stack.ports import HeldPort

END_TIMEOUT_S = 10.0
"""For a killed process to be gone; one that the kernel holds back (a dead network mount) is left behind with its ports."""

logger = logging.getLogger(__name__)


class Started(NamedTuple):
    """A server that listens, and the fork server that started it."""

    child: Child
    spawner: ForkServerClient


class AgentProcess:
    """Serves one rollout at a time, each in a new server. `error` is set, and `users` cancelled, when it dies in use."""

    def __init__(self, number: int, gateway_ports: AgentPorts) -> None:
        self.number = number
        self.gateway_ports = gateway_ports
        self.held = HeldPort()
        self.server: Started | None = None
        self.users: set[asyncio.Task[Any]] = set()
        """The rollout that holds it."""
        self.error: ServerDiedError | None = None
        self.left_behind = False
        """Whether its last process could not be ended and may still call its gateway ports."""

    @property
    def port(self) -> int:
        return self.held.number

    @property
    def alive(self) -> bool:
        return self.server is not None and self.server.child.alive

    def adopt(self, server: Started, environment: str) -> None:
        """Use this server from now on."""
        self.server = server
        self.error = None
        server.child.exited.add_done_callback(lambda _: self._fail_users(server.child, environment))

    async def end(self, grace_s: float = 0.0) -> None:
        """End its process and all that this started; wait until it is gone, `END_TIMEOUT_S` at most."""
        server, self.server = self.server, None
        if server is not None:
            await servers.end(server.spawner, [server.child], grace_s)
            await asyncio.wait([server.child.exited], timeout=END_TIMEOUT_S)
            self.left_behind = not server.child.exited.done()

    def _fail_users(self, child: Child, environment: str) -> None:
        if self.users:
            self.error = servers.died(child, environment)
            logger.warning("%s", self.error)
            for task in self.users:
                task.cancel()


class AgentProcessPool:
    """The processes of one agent, leased in the order of asking. One is kept ready, further ones start as needed."""

    def __init__(
        self,
        environment: str,
        size: int,
        gateway_ports: Callable[[], AgentPorts],
        start: Callable[[AgentProcess], Awaitable[Started]],
    ) -> None:
        self.all = [AgentProcess(number, gateway_ports()) for number in range(1, size + 1)]
        self._gateway_ports = gateway_ports
        self._environment = environment
        self._start = start
        self._free = asyncio.Semaphore(size)  # which wakes in the order of asking
        self._idle = list(reversed(self.all))
        """Those whose process runs are last."""
        self._waiting = 0
        self._settling: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def start(self) -> None:
        """Start the first process, so that an agent that cannot start says so now. Raises `StackStartError`."""
        await self._run(self._idle[-1])

    @contextlib.asynccontextmanager
    async def lease(self, route: Route) -> AsyncIterator[AgentProcess]:
        """Hold a process whose calls are the route's; waits for one.

        Raises `StackStartError` if its process does not start.
        """
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        process = self._idle.pop()
        try:
            if process.left_behind:
                process = self._replaced(process)
            if not process.alive:
                await self._run(process)
            process.gateway_ports.route = route
            yield process
        finally:
            process.gateway_ports.route = None
            task = asyncio.create_task(self._settle(process))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def stop(self, grace_s: float) -> None:
        """End every process and give the ports back. Idempotent."""
        self._stopped = True
        for task in self._settling:
            task.cancel()
        await asyncio.gather(*(process.end(grace_s) for process in self.all))
        for process in self.all:
            process.held.close()

    def processes(self) -> Iterator[tuple[Started, int, bool]]:
        """Each process with its port, and whether its rollout waits for it and not for a model."""
        for process in self.all:
            if process.alive and process.server is not None:
                route = process.gateway_ports.route
                yield process.server, process.port, bool(process.users) and not (route and route.in_flight)

    def describe(self, agent: str) -> dict[str, dict[str, Any]]:
        """The processes, as an environment's servers are told of."""
        return {
            f"{agent} process {process.number}": {
                "pid": process.server.child.pid,
                "port": process.port,
                "alive": process.alive,
            }
            for process in self.all
            if process.server is not None
        }

    async def _run(self, process: AgentProcess) -> None:
        if self._stopped:
            raise StackLostError("the stack is stopping")
        process.adopt(await self._start(process), self._environment)

    async def _settle(self, process: AgentProcess) -> None:
        """End the rollout's process, then hand the process on, whatever happens: others wait for it."""
        try:
            await process.end()
            if not process.left_behind and not self._waiting and not any(other.alive for other in self._idle):
                await self._run(process)
        except (GymgateError, OSError) as error:
            logger.warning("%s: %s", self._environment, error)  # the next rollout tries again, and is told
        finally:
            if process.alive:
                self._idle.append(process)
            else:
                self._idle.insert(0, process)
            self._free.release()

    def _replaced(self, process: AgentProcess) -> AgentProcess:
        """Return a process with new ports in place of one whose server was left behind."""
        logger.warning(
            "%s: the process %d is still there after %g s",
            self._environment,
            process.number,
            END_TIMEOUT_S,
        )
        self.all[process.number - 1] = new = AgentProcess(process.number, self._gateway_ports())
        process.held.close()  # its process may listen there yet
        return new
