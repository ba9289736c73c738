"""Agents whose model calls do not say which rollout they belong to: one process per slot, one rollout at a time.

A slot's process has gateway ports of its own, and whatever it asks there is asked by the rollout that holds the slot.
A call that came late would be the next rollout's, so a slot is handed on only if nothing can come any more: its
process is replaced after a rollout that failed or was cancelled, that left processes behind, or that called after
its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from gymgate.errors import ServerDiedError, StackLostError
from gymgate.gateway import Route, Slot
from gymgate.stack import forkserver, servers
from gymgate.stack.ports import HeldPort
from gymgate.stack.spawner import Child, Spawner

LEAVING_S, LEAVING_POLL_S = 0.5, 0.05
"""For processes that a rollout started to end, once its agent has answered."""

logger = logging.getLogger(__name__)


class Started(NamedTuple):
    """A slot's process, and what started it."""

    child: Child
    spawner: Spawner


class AgentSlot:
    """One process of an agent, or the place for one. `error` is set, and `users` cancelled, when it dies in use."""

    def __init__(self, number: int, gateway: Slot) -> None:
        self.number = number
        self.gateway = gateway
        self.held = HeldPort()
        self.process: Started | None = None
        self.users: set[asyncio.Task[Any]] = set()
        """The rollout that holds it."""
        self.error: ServerDiedError | None = None
        self.clean = False
        """Whether the rollout that held it last ended as it should."""
        self._helpers: frozenset[int] = frozenset()
        """Processes that belong to the agent rather than to a rollout."""
        self._strays = 0

    @property
    def port(self) -> int:
        return self.held.number

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.child.alive

    async def adopt(self, process: Started, environment: str) -> None:
        """Take a process that listens as this slot's."""
        self.process = process
        self.error = None
        self._strays = self.gateway.strays
        self._helpers = await asyncio.to_thread(helpers_of, process.child.pid)
        process.child.exited.add_done_callback(lambda _: self._fail_users(process.child, environment))

    async def is_reusable(self) -> bool:
        """Whether no call can come any more on behalf of the rollout that held it."""
        if not self.alive or not self.clean or self.gateway.strays != self._strays:
            return False
        assert self.process is not None
        deadline = asyncio.get_running_loop().time() + LEAVING_S
        while await asyncio.to_thread(helpers_of, self.process.child.pid) - self._helpers:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(LEAVING_POLL_S)
        return True

    async def end(self, grace_s: float = 0.0) -> None:
        """End its process; wait until it is gone."""
        process, self.process = self.process, None
        if process is None:
            return
        await servers.end(process.spawner, [process.child], grace_s)
        await asyncio.wait([process.child.exited])  # a process that lives could still call

    def has_strays(self) -> bool:
        """Whether somebody called while nobody held it."""
        return self.gateway.strays != self._strays

    def _fail_users(self, child: Child, environment: str) -> None:
        if self.users:
            self.error = servers.died(child, environment)
            logger.warning("%s", self.error)
            for task in self.users:
                task.cancel()


class Slots:
    """The slots of one agent, leased in the order of asking.

    Processes are started when they are first needed, `size` of them at most. `start` makes one that listens.
    """

    def __init__(
        self,
        environment: str,
        size: int,
        gateway_slot: Callable[[], Slot],
        start: Callable[[AgentSlot], Awaitable[Started]],
    ) -> None:
        self.all = [AgentSlot(number, gateway_slot()) for number in range(1, size + 1)]
        self._environment = environment
        self._start = start
        self._free = asyncio.Semaphore(size)  # which wakes in the order of asking
        self._idle = list(reversed(self.all))
        """Those whose process runs are last."""
        self._settling: set[asyncio.Task[None]] = set()
        self._stopped = False

    async def start(self) -> None:
        """Start the first process, so that an agent that cannot start says so now. Raises `StackStartError`."""
        await self._run(self._idle[-1])

    @contextlib.asynccontextmanager
    async def lease(self, route: Route) -> AsyncIterator[AgentSlot]:
        """A slot whose calls are the route's; the holder sets `clean` if its rollout ended as it should.

        Raises `StackStartError` if its process does not start.
        """
        await self._free.acquire()
        slot = self._idle.pop()
        slot.clean = True
        try:
            if slot.has_strays():
                await slot.end()
            if not slot.alive:
                await self._run(slot)
            slot.clean = False
            slot.gateway.route = route
            yield slot
        finally:
            slot.gateway.route = None
            task = asyncio.create_task(self._settle(slot))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def stop(self, grace_s: float) -> None:
        """End every process and give the ports back."""
        self._stopped = True
        for task in self._settling:
            task.cancel()
        await asyncio.gather(*(slot.end(grace_s) for slot in self.all))
        for slot in self.all:
            slot.held.close()

    def describe(self, agent: str) -> dict[str, dict[str, Any]]:
        """The processes, as an environment's servers are told of."""
        return {
            f"{agent} slot {slot.number}": {
                "pid": slot.process.child.pid,
                "port": slot.port,
                "alive": slot.alive,
                "rollouts": len(slot.users),
            }
            for slot in self.all
            if slot.process is not None
        }

    async def _run(self, slot: AgentSlot) -> None:
        if self._stopped:
            raise StackLostError("the stack is stopping")
        await slot.adopt(await self._start(slot), self._environment)

    async def _settle(self, slot: AgentSlot) -> None:
        """Make the slot fit for the next rollout, then hand it on."""
        if not await slot.is_reusable():
            await slot.end()
        if slot.alive:
            self._idle.append(slot)
        else:
            self._idle.insert(0, slot)
        self._free.release()


def helpers_of(server: int) -> frozenset[int]:
    """Processes that a server has started and that run; blocking, some milliseconds."""
    return frozenset(pid for pid in forkserver.helpers_of(server) if pid != server and _runs(pid))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
