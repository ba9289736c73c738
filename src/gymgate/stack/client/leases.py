"""The leases of this process: each `acquire` has a connection to its stack's daemon, which counts them.

Nothing survives a fork: a child finds no leases, and `/dev/null` in place of the connections that it inherited.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from weakref import WeakSet

from gymgate.core.config import StackConfig
from gymgate.core.errors import StackLostError, StackStartError
from gymgate.core.files import tail
from gymgate.gym.runtime.command import Progress
from gymgate.stack.client.launch import DaemonAddress, connect_or_start, connect_to
from gymgate.stack.client.stack import Lease
from gymgate.stack.paths import make_private, process_directory, shared_directory

ATTEMPTS = 3
"""Tries to connect, when the daemon that answered was about to exit."""
REAP_TIMEOUT_S = 5.0
"""For a daemon that stops to be gone: longer than all the bounds of its own steps."""
STAYS_S = 0.3
"""A shared daemon that has not begun to stop after this time stays."""


class Leases:
    """All leases and daemons of this process. Made on first use, and again after a fork."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._directory: Path | None = None
        self._daemons: dict[Path, subprocess.Popen[bytes]] = {}
        """The daemons that this process started, by socket."""
        self._replaced: list[subprocess.Popen[bytes]] = []
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._taken: WeakSet[Lease] = WeakSet()

    def drop_closed(self) -> None:
        """Let go of the leases of closed event loops, as a notebook's may be: they would keep their daemons up."""
        with self._lock:
            closed = [lease for lease in self._taken if lease.loop.is_closed()]
            self._taken.difference_update(closed)
        for lease in closed:
            lease.drop()

    async def take(self, config: StackConfig, identity: str, progress: Progress | None) -> Lease:
        """Connect to the config's daemon, which is started if none answers, and take a lease on its stack."""
        address = await asyncio.to_thread(self.address, config, identity)
        for attempt in range(1, ATTEMPTS + 1):
            lease = await self.open(address)
            try:
                return await self.greet(lease, config, progress)
            except StackLostError as error:
                if lease.peer.heard:  # it had welcomed this process, so it was not about to exit
                    raise
                if attempt == ATTEMPTS:
                    raise StackStartError(address.describe_loss(), log_tail=tail(address.log)) from error
        raise AssertionError("unreachable")

    async def greet(self, lease: Lease, config: StackConfig, progress: Progress | None) -> Lease:
        """Say hello on a new connection, which is closed if that fails."""
        with self._lock:
            self._taken.add(lease)
        lease.progress = progress
        try:
            await lease.hello(config)
        except BaseException:
            await asyncio.shield(self.close(lease))
            raise
        finally:
            lease.progress = None
        return lease

    def address(self, config: StackConfig, identity: str) -> DaemonAddress:
        """Return where a config's daemon is reached. Blocks."""
        if config.share == "machine":
            return DaemonAddress.of(config, identity, shared_directory())
        with self._lock:
            if self._directory is None:
                self._directory = process_directory()
        make_private(self._directory)  # a cleaner of temporary files may have removed it
        return DaemonAddress.of(config, identity, self._directory)

    async def open(self, address: DaemonAddress) -> Lease:
        """Connect to the daemon, which is started if none answers."""
        return await self._open(lambda: self.connect(address), address.describe_loss)

    async def join(self, path: Path) -> Lease:
        """Connect to the daemon of a running stack by its socket's path. Starts none, and leaves the path as it is."""
        return await self._open(
            lambda: (self._keep(connect_to(path)), None), lambda: f"the stack at {path} is gone"
        )

    async def _open(
        self,
        connect: Callable[[], tuple[socket.socket, subprocess.Popen[bytes] | None]],
        describe_loss: Callable[[], str],
    ) -> Lease:
        """Return a lease on the connection that `connect` makes in a thread, with the daemon if this process started it."""
        connecting = asyncio.ensure_future(asyncio.to_thread(connect))
        try:
            sock, daemon = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            (await connecting)[0].close()  # the thread goes on, and its connection would count as a lease
            raise
        lease = Lease(describe_loss, daemon)
        await asyncio.get_running_loop().create_unix_connection(lambda: lease.peer, sock=sock)
        return lease

    async def close(self, lease: Lease) -> None:
        """Give a lease back. Returns when its daemon, if this was the last lease, has exited."""
        last = await lease.goodbye()
        with self._lock:
            self._taken.discard(lease)
            is_used = any(other.daemon is lease.daemon for other in self._taken)
        if last and lease.daemon is not None and not is_used:
            await asyncio.to_thread(_reap, lease.daemon)
        for other in self._daemons.values():  # those that have ended by themselves are zombies until then
            other.poll()
        self._replaced = [other for other in self._replaced if other.poll() is None]

    def abandon(self) -> None:
        """In a forked child: let go of everything that belongs to the parent. Takes no lock."""
        # Replaced, not closed: inherited objects go on to use the numbers, which would soon be those of other files.
        with open(os.devnull, "r+b", buffering=0) as null:  # noqa: PTH123
            for sock in list(self._sockets):
                if (fd := sock.fileno()) >= 0:
                    os.dup2(null.fileno(), fd, inheritable=False)
        for process in [*self._daemons.values(), *self._replaced]:
            process.returncode = 0  # not the child's to wait for

    def at_exit(self) -> None:
        """At interpreter exit: drop every connection, and wait for the daemons that nobody else uses."""
        if self.pid != os.getpid():
            return
        # First the leases: daemons stop in order when the last one is gone, all at once.
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        shared = {path: daemon for path, daemon in self._daemons.items() if path.parent != self._directory}
        own = [daemon for path, daemon in self._daemons.items() if path not in shared]
        for process in own:
            if process.poll() is None:
                process.terminate()  # it may linger, and nobody can come back to it
        deadline = time.monotonic() + REAP_TIMEOUT_S
        for process in [*own, *self._replaced]:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for path, process in shared.items():
            _wait_if_it_stops(path, process)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def connect(self, address: DaemonAddress) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
        """Return a connection, and the daemon at the other end if this process started it. Blocks."""
        sock, process = connect_or_start(address)
        self._keep(sock)
        with self._lock:
            if process is not None:
                if (previous := self._daemons.pop(address.socket_path, None)) is not None:
                    self._replaced.append(previous)
                self._daemons[address.socket_path] = process
            return sock, self._daemons.get(address.socket_path)

    def _keep(self, sock: socket.socket) -> socket.socket:
        """Return a connection to a daemon, which a forked child and the end of this process will drop."""
        self._sockets.add(sock)
        sock.setblocking(False)
        return sock


def _wait_if_it_stops(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait for a shared daemon if it stops, which removes its socket at once. Other processes may use it."""
    started = time.monotonic()
    while process.poll() is None:
        waited_s = time.monotonic() - started
        if waited_s > REAP_TIMEOUT_S or (waited_s > STAYS_S and path.exists()):
            process.returncode = 0  # it is not this process's to end
            return
        time.sleep(0.01)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for a daemon that said it would stop. One that does not is killed; its fork server then ends the rest."""
    try:
        process.wait(REAP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_leases: Leases | None = None


def current_leases() -> Leases:
    """Return this process's leases."""
    global _leases
    if _leases is None or _leases.pid != os.getpid():
        _leases = Leases()
        atexit.register(_leases.at_exit)
    return _leases


def _after_fork() -> None:
    global _leases
    if _leases is not None:
        _leases.abandon()
        _leases = None


os.register_at_fork(after_in_child=_after_fork)
