"""Agents whose model calls do not say which rollout they belong to: a process of their own for each rollout.

A slot is a place for such a process, with gateway ports of its own; whatever is asked there is asked by the rollout
that holds the slot. Its process ends with the rollout, since a call that it made late would be the next one's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

from gymgate.errors import GymgateError, ServerDiedError, StackLostError
from gymgate.gateway import Route, Slot
from gymgate.stack import servers
from gymgate.stack.ports import HeldPort
from gymgate.stack.spawner import Child, Spawner

END_TIMEOUT_S = 10.0
"""For a killed process to be gone; one that the kernel holds back (a dead network mount) is left behind with its slot's ports."""

logger = logging.getLogger(__name__)


class Started(NamedTuple):
    """A slot's process, which listens, and what started it."""

    child: Child
    spawner: Spawner


class AgentSlot:
    """A place for one process of an agent. `error` is set, and `users` cancelled, when that dies in use."""

    def __init__(self, number: int, gateway: Slot) -> None:
        self.number = number
        self.gateway = gateway
        self.held = HeldPort()
        self.process: Started | None = None
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
        return self.process is not None and self.process.child.alive

    def adopt(self, process: Started, environment: str) -> None:
        """Take a process as this slot's."""
        self.process = process
        self.error = None
        process.child.exited.add_done_callback(lambda _: self._fail_users(process.child, environment))

    async def end(self, grace_s: float = 0.0) -> None:
        """End its process and all that this started; wait until it is gone, `END_TIMEOUT_S` at most."""
        process, self.process = self.process, None
        if process is not None:
            await servers.end(process.spawner, [process.child], grace_s)
            await asyncio.wait([process.child.exited], timeout=END_TIMEOUT_S)
            self.left_behind = not process.child.exited.done()

    def _fail_users(self, child: Child, environment: str) -> None:
        if self.users:
            self.error = servers.died(child, environment)
            logger.warning("%s", self.error)
            for task in self.users:
                task.cancel()


class Slots:
    """The slots of one agent, leased in the order of asking. One process is kept ready, further ones start as needed."""

    def __init__(
        self,
        environment: str,
        size: int,
        gateway_slot: Callable[[], Slot],
        start: Callable[[AgentSlot], Awaitable[Started]],
    ) -> None:
        self.all = [AgentSlot(number, gateway_slot()) for number in range(1, size + 1)]
        self._gateway_slot = gateway_slot
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
    async def lease(self, route: Route) -> AsyncIterator[AgentSlot]:
        """A slot whose calls are the route's, for as long as the context lasts; waits for one.

        Raises `StackStartError` if its process does not start.
        """
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        slot = self._idle.pop()
        try:
            if slot.left_behind:
                slot = self._replaced(slot)
            if not slot.alive:
                await self._run(slot)
            slot.gateway.route = route
            yield slot
        finally:
            slot.gateway.route = None
            task = asyncio.create_task(self._settle(slot))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def stop(self, grace_s: float) -> None:
        """End every process and give the ports back. Idempotent."""
        self._stopped = True
        for task in self._settling:
            task.cancel()
        await asyncio.gather(*(slot.end(grace_s) for slot in self.all))
        for slot in self.all:
            slot.held.close()

    def processes(self) -> Iterator[tuple[Started, int, bool]]:
        """Each process with its port, and whether its rollout waits for it and not for a model."""
        for slot in self.all:
            if slot.alive and slot.process is not None:
                route = slot.gateway.route
                yield slot.process, slot.port, bool(slot.users) and not (route and route.in_flight)

    def describe(self, agent: str) -> dict[str, dict[str, Any]]:
        """The processes, as an environment's servers are told of."""
        return {
            f"{agent} slot {slot.number}": {
                "pid": slot.process.child.pid,
                "port": slot.port,
                "alive": slot.alive,
            }
            for slot in self.all
            if slot.process is not None
        }

    async def _run(self, slot: AgentSlot) -> None:
        if self._stopped:
            raise StackLostError("the stack is stopping")
        slot.adopt(await self._start(slot), self._environment)

    async def _settle(self, slot: AgentSlot) -> None:
        """End the rollout's process, then hand the slot on, whatever happens: others wait for it."""
        try:
            await slot.end()
            if not slot.left_behind and not self._waiting and not any(other.alive for other in self._idle):
                await self._run(slot)
        except (GymgateError, OSError) as error:
            logger.warning("%s: %s", self._environment, error)  # the next rollout tries again, and is told
        finally:
            if slot.alive:
                self._idle.append(slot)
            else:
                self._idle.insert(0, slot)
            self._free.release()

    def _replaced(self, slot: AgentSlot) -> AgentSlot:
        """A slot with ports of its own in place of one whose process was left behind."""
        logger.warning(
            "%s: the process of slot %d is still there after %g s",
            self._environment,
            slot.number,
            END_TIMEOUT_S,
        )
        self.all[slot.number - 1] = new = AgentSlot(slot.number, self._gateway_slot())
        slot.held.close()  # its process may listen there yet
        return new
