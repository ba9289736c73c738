"""The daemon's side of one fork server: orders to it, and the processes that it makes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from gymgate.core.errors import StackStartError
from gymgate.core.files import tail
from gymgate.core.starting import SharedStart
from gymgate.gym.inside import forkserver
from gymgate.gym.runtime.command import Progress
from gymgate.stack.daemon.children import Child, disk_full, reason_in
from gymgate.stack.paths import ray_directory

KILL_TIMEOUT_S = 1.5
"""For a fork server to end what it started, which takes it a second at most, before it is killed."""
RAY_POLL_S = 0.1
"""Between looks for the address of a Ray that starts, which takes seconds."""
_LINE_LIMIT = 1 << 20
"""Bytes of an event, of which the longest has a hundred."""

logger = logging.getLogger(__name__)


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
        self._ray: SharedStart[str] | None = None

    @classmethod
    async def start(cls, python: Path, environment: Mapping[str, str], directory: Path) -> Self:
        """Start a fork server in `directory`. Returns when NeMo Gym is imported.

        Raises `StackStartError` with the end of the log if NeMo Gym cannot be imported.
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
        client = cls(process, log, writer)
        try:
            await client._await_ready(reader)
        except BaseException:
            await asyncio.shield(client.close())
            raise
        client._events = asyncio.create_task(client._read_events(reader))
        return client

    async def parse(self, name: str, log: Path, **order: Any) -> dict[str, Any]:
        """Return what NeMo Gym's parser makes of a config; see `gym.inside.resolve`."""
        out = log.with_suffix(f".{next(self._ids)}.json")
        child = await self._fork("parse", name, log, out=str(out), **order)
        try:
            status = await asyncio.shield(child.exited)
            if status != 0:
                message = f"the parser of {name!r} exited with status {status}{disk_full(log)}"
                raise StackStartError(message, log_tail=child.log_tail())
            answer: dict[str, Any] = json.loads(out.read_text())
            return answer
        finally:
            child.kill()
            out.unlink(missing_ok=True)

    async def serve(self, name: str, log: Path, **order: Any) -> Child:
        """Start a server. It is not ready yet when this returns."""
        child = await self._fork("serve", name, log, **order)
        child.uses_ray = bool(order["ray"])
        return child

    async def ray_address(self, progress: Progress) -> str:
        """Return the address of the Ray that this fork server's children share, started by the first who asks."""
        if self._ray is None:
            self._ray = SharedStart(lambda: self._start_ray(progress))
        return await self._ray.get()

    def kill(self, child: Child, number: int = signal.SIGKILL) -> None:
        """Send a child a signal. SIGKILL goes to its whole process group."""
        if child.alive and not self.dead.is_set():
            self._order(op="kill", pid=child.pid, signal=int(number), group=number == signal.SIGKILL)

    async def ping(self) -> None:
        """Return when the fork server has answered. One at a time."""
        self._pong = asyncio.get_running_loop().create_future()
        self._order(op="ping")
        await self._pong

    def kill_itself(self, reason: str) -> None:
        """Kill the fork server and thereby everything that it started; `reason` appears in errors."""
        self._killed_for = f"the fork server {reason}"
        self.process.kill()

    async def close(self) -> None:
        """End the fork server and everything that it started."""
        self._orders.close()  # at which it kills its children and exits
        try:
            await asyncio.to_thread(self.process.wait, KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        if self._events is not None:
            self._events.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._events
        await self._bury()

    async def _await_ready(self, reader: asyncio.StreamReader) -> None:
        line = await reader.readline()
        if not line:
            await asyncio.to_thread(self.process.wait)
            text = tail(self.log)
            last = (text.splitlines()[-1] if text else "no output") + disk_full(self.log)
            raise StackStartError(
                f"NeMo Gym could not be imported by {self.process.args[0]!s}: {last}",  # type: ignore[index]
                server="fork server",
                log_tail=text,
            )
        if (threads := json.loads(line)["threads"]) != 1:
            logger.warning("fork server runs %d threads; forking it may hang a server", threads)

    async def _start_ray(self, progress: Progress) -> str:
        progress("starting Ray")
        directory = ray_directory()
        log = self.log.with_name(self.log.name.replace("forkserver", "ray"))
        address = log.with_suffix(".address")
        address.unlink(missing_ok=True)
        child = await self._fork("ray", "ray", log, out=str(address), directory=str(directory / "r"))
        while child.alive:
            if address.exists():
                child.exited.add_done_callback(self._ray_died)
                return address.read_text()
            await asyncio.sleep(RAY_POLL_S)
        text = child.log_tail()
        reason = reason_in(text) or "its log is empty"
        raise StackStartError(f"Ray did not start: {reason}", server="ray", log_tail=text)

    def _ray_died(self, _: object) -> None:
        """Kill the servers that work through the dead Ray: they would fail one rollout after another."""
        self._ray = None
        for child in self._children.values():
            if child.uses_ray:
                child.kill(reason="its Ray died")

    async def _fork(self, op: str, name: str, log: Path, **order: Any) -> Child:
        number = next(self._ids)
        started: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._starting[number] = (name, log, started)
        self._order(op=op, id=number, log=str(log), **order)
        try:
            return await asyncio.shield(started)
        except asyncio.CancelledError:
            started.add_done_callback(_abandon)
            raise

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
                    child = Child(name, event["pid"], log, loop.create_future(), self)
                    self._children[child.pid] = child
                    started.set_result(child)
                elif (ended := self._children.pop(event["pid"], None)) is not None:
                    ended.exited.set_result(event["status"])
        except OSError:
            pass
        finally:
            await self._bury()

    async def _bury(self) -> None:
        """Mark the fork server and its children as dead, and kill what is left of them."""
        if self.dead.is_set():
            return
        self.dead.set()
        message = self._killed_for or "the fork server died"
        for _, _, started in self._starting.values():
            started.set_exception(StackStartError(message, server="fork server"))
            started.exception()
        self._starting.clear()
        orphans = [*self._children.values()]
        self._children.clear()
        try:
            if orphans:
                await asyncio.to_thread(_kill_leftovers, [child.pid for child in orphans])
        finally:  # only now: who waits for these exits starts servers at the same ports
            for child in orphans:
                child.killed_for = child.killed_for or self._killed_for
                child.exited.set_result(None)


def _abandon(started: asyncio.Future[Child]) -> None:
    if not started.cancelled() and started.exception() is None:
        started.result().kill()


def _kill_leftovers(servers: list[int]) -> None:
    """Kill the servers of a dead fork server and their helpers, which the kernel has made our children. Blocks."""
    ours = set(forkserver.descendants(os.getpid()))
    for server in servers:
        for pid in {server, *forkserver.helpers_of(server)} & ours:
            forkserver.send_signal(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError, PermissionError):
                os.waitpid(pid, os.WNOHANG)
