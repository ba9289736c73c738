"""Processes that a fork server made: how to start and end servers, and how to say why one died."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gymgate.core.errors import ServerDiedError, StackStartError
from gymgate.core.files import tail
from gymgate.stack.ports import listens

if TYPE_CHECKING:
    from gymgate.stack.daemon.forkserver_client import ForkServerClient

POLL_S, MAX_POLL_S = 0.02, 0.2
GRACE_S = 0.8
"""For a server to shut down after SIGINT, before it is killed, and then to be gone. The stack's stop is bounded, too."""
MAX_REASON = 400
MIN_FREE = 1 << 16
"""Bytes. With less free space a process may have failed because the disk is full."""
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b")
_SYNTAX = re.compile(r"(SyntaxError|IndentationError|TabError)\b")
_PLACE = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)
_POINTER = re.compile(r"\s+For further information visit ")


@dataclass(eq=False)
class Child:
    """A process that a fork server made: a server, a parser, the driver of Ray."""

    name: str
    pid: int
    log: Path
    exited: asyncio.Future[int | None] = field(repr=False)
    """Exit status as of `subprocess`; `None` if the fork server died before it reported one."""
    fork_server: ForkServerClient = field(repr=False)
    killed_for: str | None = None
    """Why gymgate killed it, if it was not an ordinary stop."""
    uses_ray: bool = False
    """Whether it works through the fork server's Ray."""
    listens: bool = False
    """Whether `until_listening` has seen that it is up."""

    @property
    def alive(self) -> bool:
        return not self.exited.done()

    @property
    def exit_reason(self) -> str:
        """How it ended, in words."""
        status = self.exited.result() if self.exited.done() else None
        if self.killed_for is not None:
            return self.killed_for
        if status is None:
            return "the fork server died"
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def kill(self, number: int = signal.SIGKILL, reason: str | None = None) -> None:
        """Send it a signal. SIGKILL goes to its whole process group; `reason` appears in errors."""
        self.killed_for = self.killed_for or reason
        self.fork_server.kill(self, number)

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        return tail(self.log)

    def exit_error(self, environment: str) -> ServerDiedError:
        """Return the error for a server that died after it had started."""
        message = f"server {self.name!r} of {environment!r} died ({self.exit_reason})"
        return ServerDiedError(message, environment=environment, server=self.name, log_tail=self.log_tail())


async def until_listening(child: Child, port: int, environment: str) -> None:
    """Return when the child listens on its port. Raises `StackStartError` if it exits first."""
    pause = POLL_S
    while child.alive:
        if await listens(child.pid, port):
            child.listens = True
            return
        await asyncio.wait([child.exited], timeout=pause)
        pause = min(pause * 1.3, MAX_POLL_S)
    text = child.log_tail()
    reason = (
        f": {reason_in(text)}"
        if text
        else disk_full(child.log) or "; its log is empty, so look for what ends its process"
    )
    message = f"server {child.name!r} of {environment!r} died while starting ({child.exit_reason}){reason}"
    status = child.exited.result()
    raise StackStartError(
        message, environment=environment, server=child.name, log_tail=text, exit_status=status
    )


async def end(children: Iterable[Child], grace_s: float = 0.0) -> None:
    """Kill servers, with SIGINT and a grace period first if there is one. Wait up to `GRACE_S` until they are gone."""
    running = [child for child in children if child.alive]
    if not running:
        return
    exits = [child.exited for child in running]
    if grace_s:
        for child in running:
            child.kill(signal.SIGINT)
        await asyncio.wait(exits, timeout=grace_s)
    for child in running:
        child.kill()
    await asyncio.wait(exits, timeout=GRACE_S)


def reason_in(log: str) -> str:
    """Return the reason in the end of a log: its last exception with the whole message, else its last line.

    An error of syntax follows file and line: only they say where it is.
    """
    lines = [line for line in log.splitlines() if line.strip() and not _POINTER.match(line)]
    starts = [number for number, line in enumerate(lines) if _EXCEPTION.match(line)]
    last = lines[starts[-1] :] if starts else lines[-1:]
    places = _PLACE.findall("\n".join(lines[: starts[-1]])) if starts and _SYNTAX.match(last[0]) else []
    where = [":".join(place) + ":" for place in places[-1:]]
    return " ".join(" ".join([*where, *last]).split())[:MAX_REASON]


def start_timeout_error(environment: str, timeout_s: float, awaited: Child | None) -> StackStartError:
    """Return the error for servers that did not listen in time; `awaited` is one of them."""
    return StackStartError(
        f"environment {environment!r} was not up after {timeout_s:g} s"
        + (f"; still waiting for server {awaited.name!r}" if awaited else "")
        + "; raise start_timeout_s if its servers need longer",
        environment=environment,
        server=awaited.name if awaited else None,
        log_tail=awaited.log_tail() if awaited else None,
        timed_out=True,
    )


def disk_full(log: Path) -> str:
    """Return the end of an error message where a log may be empty because its disk is full; else an empty string."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(log.parent).free < MIN_FREE:
            return f": No space left on device for {str(log.parent)!r}"
    return ""
