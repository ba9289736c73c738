"""The daemons of a stack, each on a host of its own, and leases on them."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from pathlib import Path
from typing import Any

import simloom
from parts import Daemon, Lease, Stack, StackConfig, StackLostError, daemon_module

from scenes.faults import seconds

PORT = 7000
ATTEMPTS = 3
"""Tries to connect, as `Leases.take` has."""


class SimulatedDaemon(Daemon):
    """A daemon that listens on a simulated port, without signals and without watching its starter."""

    def __init__(self, host: Any, directory: Path, run: Any = None) -> None:
        """`run` takes the place of running a rollout."""
        super().__init__(None, Path("/nowhere/daemon.sock"), directory, 0)  # type: ignore[arg-type]
        self.host = host
        self.run = run
        self.listening = asyncio.Event()

    async def serve(self) -> None:
        server = await self._loop.create_server(self._connected, self.host.name, PORT)
        self._retire_in(daemon_module.HELLO_TIMEOUT_S)
        self.listening.set()
        await self._stopping.wait()
        server.close()
        await self._stop()

    def _connected(self) -> Any:
        peer = super()._connected()
        if self.run is not None:
            holder = next(holder for holder in self.leases if holder.peer is peer)
            peer.handlers["run"] = lambda message, row: self.run(holder, message, row)
        return peer

    def _is_asked(self) -> bool:
        return False


class Daemons:
    """Starts a stack's daemons, one after the other, as `launch` and `Leases` do."""

    def __init__(self, world: Any, directory: Path = Path("/nowhere"), run: Any = None) -> None:
        self.all: list[SimulatedDaemon] = []
        self.serving: dict[asyncio.Task[Any], Any] = {}
        self._world = world
        self._directory = directory
        self._run = run
        self._starting = asyncio.Lock()
        # In this context, or a daemon would crash with the host of the client that starts it.
        self._outside = contextvars.copy_context()

    @property
    def latest(self) -> SimulatedDaemon | None:
        return self.all[-1] if self.all else None

    async def open_stack(self, config: StackConfig) -> Stack:
        """Open a stack as a client does; one that loses its daemon connects again, or does not."""
        reconnects = bool(simloom.draw("reconnects", 2))
        return await Stack._open(config, lambda: self.take(config), Lease.goodbye, reconnect=reconnects)

    async def take(self, config: StackConfig) -> Lease:
        """Connect to the daemon, which is started if none answers, and take a lease on its stack."""
        for attempt in range(1, ATTEMPTS + 1):
            async with self._starting:  # as the lock of the socket
                latest = self.latest
                is_there = latest is not None and not latest.is_retired and not latest.host.crashed
                daemon = latest if is_there and latest is not None else await self._start()
            await asyncio.sleep(seconds("until it is accepted", 0.2))
            lease = Lease(lambda: "the daemon is gone", None)
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().create_connection(
                    lambda lease=lease: lease.peer, daemon.host.name, PORT
                )
            try:
                await lease.hello(config)
                return lease
            except BaseException as error:
                await asyncio.shield(lease.goodbye())
                if not isinstance(error, StackLostError) or lease.peer.heard or attempt == ATTEMPTS:
                    raise
                simloom.reached("came too late")
        raise AssertionError

    @property
    def leases(self) -> int:
        """Connections that hold a lease."""
        return sum(len(daemon.leases) for daemon in self.all if not daemon.host.crashed)

    async def _start(self) -> SimulatedDaemon:
        host = self._world.host(f"daemon{len(self.all)}")
        daemon = self._outside.run(SimulatedDaemon, host, self._directory, self._run)
        self.all.append(daemon)
        self.serving[self._outside.run(host.spawn, daemon.serve)] = host
        await daemon.listening.wait()
        return daemon
