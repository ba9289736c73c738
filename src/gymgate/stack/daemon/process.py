"""The daemon of a stack: it counts leases, starts the stack for the first and stops it after the last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
from pathlib import Path
from typing import Any

from gymgate.core.config import StackConfig
from gymgate.core.errors import GymgateError, StackLostError, StackStartError
from gymgate.core.starting import SharedStart
from gymgate.stack.daemon.lease_holder import LeaseHolder
from gymgate.stack.daemon.running_stack import RunningStack
from gymgate.stack.logs import keep_short
from gymgate.stack.protocol import BACKLOG, Peer

HELLO_TIMEOUT_S = 30.0
"""For the first lease to come, before a daemon that nobody uses exits."""
ANSWER_TIMEOUT_S = 1.0
"""For calls under way to be answered or cancelled, when everything stops."""

logger = logging.getLogger(__name__)


class Daemon:
    """Counts leases, starts the stack for the first one and stops it after the last.

    It alone decides when it stops, and then removes its socket. A process that connects too late loses its connection
    and tries again, with another daemon.
    """

    def __init__(self, listener: socket.socket, path: Path, directory: Path, starter: int) -> None:
        self.listener = listener
        self.path = path
        self.directory = directory
        self.starter = starter
        self.leases: set[LeaseHolder] = set()
        """The connections that have not said bye and do not only observe."""
        self._orphaned = False
        """Whether the process that started this one is gone."""
        self._asked_linger_s = 0.0
        """The longest `linger_s` that a user of the stack asked for."""
        self._stopping = asyncio.Event()
        self._stack: RunningStack | None = None
        self._start: SharedStart[RunningStack] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        """Serve until the last lease is gone."""
        self._loop.add_signal_handler(signal.SIGTERM, self._terminated)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Without `backlog` the event loop would shorten the queue of a socket that listens already.
        server = await self._loop.create_unix_server(self._connected, sock=self.listener, backlog=BACKLOG)
        self._retire_in(HELLO_TIMEOUT_S)
        self._watch_starter()
        logs = asyncio.create_task(keep_short(self.directory))
        await self._stopping.wait()
        server.close()  # before the long part: whoever connects from now on starts another daemon
        await self._stop()
        logs.cancel()

    @property
    def is_retired(self) -> bool:
        """Whether this daemon takes no more leases and stops."""
        return self._stopping.is_set()

    def retire(self) -> None:
        """Stop, although somebody may hold a lease. Whoever comes next starts another daemon."""
        if not self.is_retired:  # the socket may be another daemon's later
            # In this order: who finds the path gone starts another daemon, who was in time is told by `hello`.
            with contextlib.suppress(OSError):
                self.path.unlink()
            self._stopping.set()
            self._disarm()

    async def started(self, config: StackConfig) -> RunningStack:
        """Return the stack, started by the first caller. A failed start is raised in everyone who waits."""
        self._disarm()
        self._asked_linger_s = max(self._asked_linger_s, config.linger_s)
        if self._start is None:
            self._start = SharedStart(lambda: self._start_stack(config))
        return await self._start.get()

    async def joined(self, config: StackConfig) -> RunningStack:
        """Return the stack for a caller that starts none. Raises `ConfigError` if it is not what the config asks for."""
        if self._start is None:
            raise StackLostError("nobody has started this stack yet")
        self._disarm()
        stack = await self._start.get()
        stack.refuse_other(config)
        return stack

    @property
    def running(self) -> RunningStack:
        """The stack, once it is up."""
        if self._start is None or (stack := self._start.value) is None:
            raise StackLostError("the stack is not up")
        return stack

    def release(self, holder: LeaseHolder) -> bool:
        """Give a connection's lease back; idempotent. Returns whether everything stops now, as it was the last."""
        if holder in self.leases:
            self.leases.remove(holder)
            if self._is_idle:
                self._unused()
        return self.is_retired

    def dismiss(self, holder: LeaseHolder) -> None:
        """Forget an observer. If it was all that kept the stack up, end the stack."""
        self.leases.discard(holder)
        # An observer's visit does not prolong the time for which an unused stack lingers.
        lingering = self._timer is not None and self._linger_s > 0
        if self._is_idle and not lingering:
            self._unused()

    def report(self) -> dict[str, Any]:
        """Return what `gymgate ps` shows, in whatever state. Costs next to nothing."""
        is_up = self._start is not None and self._start.value is not None
        processes = {pid for holder in self.leases if (pid := holder.peer.peer_pid) is not None}
        return {
            "state": "stopping" if self.is_retired else "ready" if is_up else "starting",
            "leases": len(self.leases),
            "ends_in_s": self._timer.when() - self._loop.time() if self._timer and self._linger_s else None,
            "processes": sorted(processes),
            **({"environments": {}, "rollouts": 0} if self._stack is None else self._stack.summary()),
        }

    def _terminated(self) -> None:
        """Stop as `gymgate stop` asks, and say so to everyone who holds a lease."""
        if not self.is_retired:
            for holder in self.leases:
                holder.peer.tell(
                    "stopped", reason="it was told to stop (SIGTERM, as `gymgate stop` sends it)"
                )
            self.retire()

    def _unused(self) -> None:
        """Stop, now or after the time for which the stack lingers, unless somebody is connecting."""
        if (linger_s := self._linger_s) > 0:
            self._retire_in(linger_s)
        elif not self._is_asked():
            self.retire()

    def _is_asked(self) -> bool:
        """Whether a connection waits to be accepted. `select.select` would refuse a descriptor beyond 1,023."""
        poll = select.poll()
        poll.register(self.listener, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def _is_idle(self) -> bool:
        """Whether nobody is connected and nothing stops yet."""
        return not self.leases and not self.is_retired

    @property
    def _linger_s(self) -> float:
        """Zero for the stack of one process that is gone, since nobody else can come back to it."""
        if self._start is None or (stack := self._start.value) is None:
            return 0.0
        return 0.0 if self._orphaned and stack.config.share == "process" else self._asked_linger_s

    def _progress(self, message: str) -> None:
        """Send a line to everyone who waits for the stack. Callable from any thread."""
        self._loop.call_soon_threadsafe(self._send_progress, message)

    def _send_progress(self, message: str) -> None:
        logger.info("%s", message)
        for holder in self.leases:
            holder.peer.tell("progress", message=message)

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
        if self._is_idle and self._linger_s == 0:
            self._unused()

    def _connected(self) -> Peer:
        holder = LeaseHolder(self)
        self.leases.add(holder)
        return holder.peer

    async def _start_stack(self, config: StackConfig) -> RunningStack:
        self._stack = RunningStack(config, self.directory, self._progress)
        try:
            await self._stack.start()
        except BaseException as error:
            self.retire()
            if isinstance(error, GymgateError | asyncio.CancelledError):
                raise
            logger.exception("start failed")
            message = f"the stack could not be started: {type(error).__name__}: {error}"
            raise StackStartError(message) from error
        return self._stack

    def _retire_in(self, seconds: float) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, self.retire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _stop(self) -> None:
        """Stop rollouts first, then servers, then everything that is left. Bounded."""
        # Rollouts before servers: a rollout whose server is killed first would report that as its error.
        is_up = self._start is not None and await self._start.stop() is not None
        calls = {task for holder in self.leases for task in holder.peer.tasks.values()}
        if is_up:
            for call in calls:
                call.cancel()
        if calls:  # whoever waited for a failed start is answered
            await asyncio.wait(calls, timeout=ANSWER_TIMEOUT_S)
        if self._stack is not None:
            await self._stack.stop()
