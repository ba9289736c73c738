"""The daemon's hold on a fork server: orders, and the processes that came of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from gymgate.errors import StackStartError
from gymgate.files import tail
from gymgate.stack import forkserver

KILL_TIMEOUT_S = 1.5
LITTLE_ROOM = 1 << 16
"""Bytes free, below which a process may have failed for lack of them."""
_LINE_LIMIT = 1 << 20

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Child:
    """A process that the fork server made: a server, a parser, the driver of Ray."""

    name: str
    pid: int
    log: Path
    exited: asyncio.Future[int | None] = field(repr=False)
    """Exit status as of `subprocess`; `None` where the fork server died before it could tell."""
    killed_for: str | None = None
    """Why it was killed, where it is not stopped in order."""
    uses_ray: bool = False
    """It works through the fork server's Ray."""

    @property
    def alive(self) -> bool:
        return not self.exited.done()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        return tail(self.log, lines)


def no_room(log: Path) -> str:
    """For an error message, where a log may be empty because its disk is full."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(log.parent).free < LITTLE_ROOM:
            return f": No space left on device for {str(log.parent)!r}"
    return ""


class ForkServerClient:
    """One fork server, in one NeMo Gym interpreter. Belongs to the event loop that started it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, orders: asyncio.StreamWriter) -> None:
        self.process = process
        self.log = log
        self.dead = asyncio.Event()
        self._killed_for: str | None = None
        self._pong: asyncio.Future[None] | None = None
        self._orders = orders
        self._ids = itertools.count(1)
        self._starting: dict[int, tuple[str, Path, asyncio.Future[Child]]] = {}
        self._children: dict[int, Child] = {}
        self._events: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, python: Path, environment: Mapping[str, str], directory: Path) -> Self:
        """Start a fork server in `directory`; returns when NeMo Gym is imported.

        Raises `StackStartError` with the end of its log if that fails.
        """
        ours, theirs = socket.socketpair()
        log = directory / f"forkserver-{os.urandom(3).hex()}.log"
        with theirs, log.open("ab") as sink:
            # Not in a thread: the kernel ties the child's death signal to the thread that made it.
            process = subprocess.Popen(  # noqa: ASYNC220
                [str(python), str(Path(forkserver.__file__).with_name("__main__.py")), str(theirs.fileno())],
                cwd=directory,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_LINE_LIMIT)
        spawner = cls(process, log, writer)
        try:
            await spawner._await_ready(reader)
        except BaseException:
            await asyncio.shield(spawner.close())
            raise
        spawner._events = asyncio.create_task(spawner._read_events(reader))
        return spawner

    async def parse(self, name: str, log: Path, **order: Any) -> dict[str, Any]:
        """What NeMo Gym's parser makes of a config; see `forkserver.parsing`."""
        out = log.with_suffix(f".{next(self._ids)}.json")
        child = await self._spawn("parse", name, log, out=str(out), **order)
        try:
            status = await asyncio.shield(child.exited)
            if status != 0:
                raise StackStartError(
                    f"the parser of {name!r} exited with status {status}{no_room(log)}",
                    log_tail=child.log_tail(),
                )
            answer: dict[str, Any] = json.loads(out.read_text())
            return answer
        finally:
            self.kill(child)
            out.unlink(missing_ok=True)

    async def serve(self, name: str, log: Path, **order: Any) -> Child:
        """A server; it is not ready yet when this returns."""
        child = await self._spawn("serve", name, log, **order)
        child.uses_ray = bool(order["ray"])
        return child

    async def start_ray(self, log: Path, directory: Path) -> tuple[Child, Path]:
        """A local Ray, with its sockets and files in `directory`; the file that its address will be in."""
        out = log.with_suffix(".address")
        out.unlink(missing_ok=True)
        return await self._spawn("ray", "ray", log, out=str(out), directory=str(directory)), out

    def kill(self, child: Child, number: int = signal.SIGKILL) -> None:
        """Signal a child: SIGKILL goes to its whole process group."""
        if child.alive and not self.dead.is_set():
            self._order(op="kill", pid=child.pid, signal=int(number), group=number == signal.SIGKILL)

    def kill_users_of_ray(self) -> None:
        """Kill the servers that know a Ray which is gone: they would fail one rollout after another."""
        for child in self._children.values():
            if child.uses_ray:
                child.killed_for = child.killed_for or "its Ray died"
                self.kill(child)

    async def ping(self) -> None:
        """Return when the fork server has answered; one at a time."""
        self._pong = asyncio.get_running_loop().create_future()
        self._order(op="ping")
        await self._pong

    def kill_itself(self, reason: str) -> None:
        """Kill the fork server and thereby everything that it started; `reason` will stand in errors."""
        self._killed_for = f"the fork server {reason}"
        self.process.kill()

    async def close(self) -> None:
        """End the fork server and everything that it started."""
        self._orders.close()
        exited = asyncio.to_thread(self.process.wait, KILL_TIMEOUT_S)
        try:
            await exited
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        if self._events is not None:
            self._events.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._events
        self._bury()

    async def _await_ready(self, reader: asyncio.StreamReader) -> None:
        line = await reader.readline()
        if not line:
            await asyncio.to_thread(self.process.wait)
            text = tail(self.log)
            last = (text.splitlines()[-1] if text else "no output") + no_room(self.log)
            raise StackStartError(
                f"NeMo Gym could not be imported by {self.process.args[0]!s}: {last}",  # type: ignore[index]
                server="fork server",
                log_tail=text,
            )
        if (threads := json.loads(line)["threads"]) != 1:
            logger.warning("fork server runs %d threads; forking it may hang a server", threads)

    async def _spawn(self, op: str, name: str, log: Path, **order: Any) -> Child:
        number = next(self._ids)
        started: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._starting[number] = (name, log, started)
        self._order(op=op, id=number, log=str(log), **order)
        try:
            return await asyncio.shield(started)
        except asyncio.CancelledError:
            started.add_done_callback(self._abandon)
            raise

    def _abandon(self, started: asyncio.Future[Child]) -> None:
        if not started.cancelled() and started.exception() is None:
            self.kill(started.result())

    def _order(self, **order: Any) -> None:
        if self.dead.is_set():
            raise StackStartError("the fork server is gone", server="fork server", log_tail=tail(self.log))
        self._orders.write(json.dumps(order).encode() + b"\n")

    async def _read_events(self, reader: asyncio.StreamReader) -> None:
        loop = asyncio.get_running_loop()
        try:
            while line := await reader.readline():
                event = json.loads(line)
                if event["event"] == "pong":
                    if self._pong is not None and not self._pong.done():
                        self._pong.set_result(None)
                elif event["event"] == "started":
                    name, log, started = self._starting.pop(event["id"])
                    child = Child(name, event["pid"], log, loop.create_future())
                    self._children[child.pid] = child
                    started.set_result(child)
                elif (ended := self._children.pop(event["pid"], None)) is not None:
                    ended.exited.set_result(event["status"])
        except OSError:
            pass
        finally:
            self._bury()

    def _bury(self) -> None:
        """Nothing will be heard of the fork server's children any more."""
        if self.dead.is_set():
            return
        self.dead.set()
        orphans = list(self._children)
        message = self._killed_for or "the fork server died"
        for _, _, started in self._starting.values():
            started.set_exception(StackStartError(message, server="fork server"))
            started.exception()
        for child in self._children.values():
            child.killed_for = child.killed_for or self._killed_for
            child.exited.set_result(None)
        self._children.clear()
        self._starting.clear()
        if orphans:
            kill_leftovers(orphans)


def kill_leftovers(servers: list[int]) -> None:
    """Kill servers of a dead fork server and their helpers, which the kernel has made our children."""
    ours = set(forkserver.descendants(os.getpid()))
    for server in servers:
        for pid in {server, *forkserver.helpers_of(server)} & ours:
            forkserver.send_signal(pid, signal.SIGKILL)
            reap(pid)


def reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError, PermissionError):
        os.waitpid(pid, os.WNOHANG)
