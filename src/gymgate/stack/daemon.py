"""The stack's daemon: one process per stack, outside the SDK's interpreter lock, forks and event loops.

    python -m gymgate.stack.daemon LISTENING_FD SOCKET_PATH DIRECTORY STARTER_PID

A connection that has said hello is a lease. The config of the first one is what is started. When the last lease is
gone and `linger_s` has passed, everything stops and the process exits. The stack of one process does not outlive
that process, nor does a daemon whose starter died before anybody connected.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path

import uvloop

from gymgate.config import StackConfig
from gymgate.errors import GymgateError, StackLostError, StackStartError
from gymgate.gateway.limits import relax_collector
from gymgate.stack import forkserver
from gymgate.stack.logs import keep_short
from gymgate.stack.paths import locked, remove_traces
from gymgate.stack.protocol import Peer
from gymgate.stack.running import RunningStack
from gymgate.stack.session import Session
from gymgate.starting import SharedStart

HELLO_TIMEOUT_S = 30.0
"""For the first lease to come, before a daemon that nobody uses exits."""

logger = logging.getLogger(__name__)


class Daemon:
    """Counts leases, starts the stack for the first one and stops it after the last."""

    def __init__(self, listener: socket.socket, path: Path, directory: Path, starter: int) -> None:
        self.listener = listener
        self.path = path
        self.directory = directory
        self.starter = starter
        self.sessions: set[Session] = set()
        self._doomed = False
        """Whether to stop although somebody holds a lease: the start failed, or a signal came."""
        self._orphaned = False
        """Whether the process that started this one is gone."""
        self._deciding: asyncio.Task[bool] | None = None
        """Decides whether to stop; stays once it has decided so."""
        self._asked = False
        """Whether to decide once more, since a decision may be about a state that has changed."""
        self._stopping = asyncio.Event()
        self._stack: RunningStack | None = None
        self._start: SharedStart[RunningStack] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        """Serve until the last lease is gone."""
        self._loop.add_signal_handler(signal.SIGTERM, self._doom)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        server = await self._loop.create_unix_server(self._connected, sock=self.listener)
        self._stop_in(HELLO_TIMEOUT_S)
        self._watch_starter()
        logs = asyncio.create_task(keep_short(self.directory))
        await self._stopping.wait()
        server.close()
        await self._stop()
        logs.cancel()

    async def is_retired(self) -> bool:
        """Whether this daemon stops. Waits while that is being decided."""
        return self._deciding is not None and await asyncio.shield(self._deciding)

    async def started(self, config: StackConfig) -> RunningStack:
        """Return the stack, started by the first caller. A failed start is raised in everyone who waits."""
        self._disarm()
        if self._start is None:
            self._start = SharedStart(lambda: self._start_stack(config))
        return await self._start.get()

    @property
    def running(self) -> RunningStack:
        """The stack, once it is up."""
        if self._start is None or (stack := self._start.value) is None:
            raise StackLostError("the stack is not up")
        return stack

    @property
    def leases(self) -> int:
        return sum(session.leased for session in self.sessions)

    async def lease_gone(self) -> bool:
        """Stop if that was the last lease and nothing lingers. Returns whether everything stops."""
        return self._lease_gone() and await asyncio.shield(self._decision())

    def session_lost(self, session: Session) -> None:
        """Drop a session and its lease, if it had one. Without any other, there is nobody left to wait for."""
        self.sessions.discard(session)
        if session.leased or (self._start is None and not self.sessions):
            session.leased = False
            self._lease_gone()

    def _lease_gone(self) -> bool:
        """Begin to stop if no lease is left and nothing lingers; returns whether that is so."""
        if self.leases:
            return False
        if (linger_s := self._linger_s) > 0:
            self._stop_in(linger_s)
            return False
        self._decision()
        return True

    @property
    def _linger_s(self) -> float:
        """Zero for the stack of one process that is gone, since nobody else can come back to it."""
        if self._start is None or (stack := self._start.value) is None:
            return 0.0
        config = stack.config
        return 0.0 if self._orphaned and config.share == "process" else config.linger_s

    def _progress(self, message: str) -> None:
        """Send a line to everyone who waits for the stack. Callable from any thread."""
        self._loop.call_soon_threadsafe(self._send_progress, message)

    def _send_progress(self, message: str) -> None:
        logger.info("%s", message)
        for session in self.sessions:
            session.peer.tell("progress", message=message)

    def _watch_starter(self) -> None:
        """Notice the end of the process that started this one."""
        try:
            pidfd = os.pidfd_open(self.starter)
        except OSError:
            pidfd = -1
        if pidfd < 0 or os.getppid() != self.starter:  # gone already, its number perhaps another's
            self._starter_gone()
        else:
            self._loop.add_reader(pidfd, self._starter_gone, pidfd)

    def _starter_gone(self, pidfd: int = -1) -> None:
        if pidfd >= 0:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._orphaned = True
        if not self.sessions and self._linger_s == 0:
            self._lease_gone()

    def _connected(self) -> Peer:
        session = Session(self)
        self.sessions.add(session)
        return session.peer

    async def _start_stack(self, config: StackConfig) -> RunningStack:
        self._stack = RunningStack(config, self.directory, self._progress)
        try:
            await self._stack.start()
        except BaseException as error:
            self._doom()
            if isinstance(error, GymgateError | asyncio.CancelledError):
                raise
            logger.exception("start failed")
            message = f"the stack could not be started: {type(error).__name__}: {error}"
            raise StackStartError(message) from error
        return self._stack

    def _doom(self) -> None:
        self._doomed = True
        self._decision()

    def _stop_in(self, seconds: float) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, self._decision)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _decision(self) -> asyncio.Task[bool]:
        """Have it decided whether everything stops; the task returns that."""
        self._asked = True
        if self._deciding is None:
            self._deciding = asyncio.create_task(self._decide())
        return self._deciding

    async def _decide(self) -> bool:
        stops = False
        while self._asked and not stops:
            self._asked = False
            try:
                stops = await asyncio.to_thread(self._retire)
            except OSError:  # such as too many open files; asked again after a while
                logger.exception("cannot remove the stack's socket")
        if stops:
            self._stopping.set()
        else:
            self._deciding = None
            if self._doomed or not self.leases:
                self._stop_in(HELLO_TIMEOUT_S)
        return stops

    def _retire(self) -> bool:
        """Remove the socket, so that nobody can connect any more; false if somebody just has."""
        try:
            with locked(self.path):
                connecting = bool(select.select([self.listener], [], [], 0)[0])
                if not self._doomed and (connecting or self.leases):
                    return False
                self.path.unlink(missing_ok=True)
                return True
        except FileNotFoundError:  # its directory was removed, so nobody can connect
            return self._doomed or not self.leases

    async def _stop(self) -> None:
        """Stop rollouts first, then servers, then everything that is left. Bounded."""
        if self._start is not None:
            await self._start.stop()
        await asyncio.sleep(0)  # whoever waited for a failed start is answered
        for session in self.sessions:
            for task in [] if session.left else session.peer.tasks.values():
                task.cancel()
        if self._stack is not None:
            await self._stack.stop()


def main(argv: list[str]) -> None:
    """Serve on an inherited listening socket."""
    fd, path, directory, starter = int(argv[0]), Path(argv[1]), Path(argv[2]), int(argv[3])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    forkserver.prctl(forkserver.PR_SET_CHILD_SUBREAPER, 1)
    _without_core_files()
    listener = socket.socket(fileno=fd)
    listener.set_inheritable(False)
    relax_collector()
    try:
        uvloop.run(_serve(listener, path, directory, starter))
    finally:
        remove_traces(path, directory)


def _without_core_files() -> None:
    """Keep a crash from writing endpoints' keys to disk. The limit of one byte also stops the pipe of a core handler."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if hard == resource.RLIM_INFINITY or hard > 1:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


async def _serve(listener: socket.socket, path: Path, directory: Path, starter: int) -> None:
    """Serve, then exit without waiting for threads: one may wait for the lock of a runtime under construction."""
    await Daemon(listener, path, directory, starter).serve()
    remove_traces(path, directory)
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
