"""Starting and ending servers: what an environment's and an agent process's have in common."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterable

from gymgate.errors import ServerDiedError, StackStartError
from gymgate.stack.forkserver_client import Child, ForkServerClient, no_room
from gymgate.stack.ports import listening_inodes, owns_socket

POLL_S, MAX_POLL_S = 0.02, 0.2
GRACE_S = 0.8
"""For a server to shut down after SIGINT, before it is killed."""
MAX_REASON = 400
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b")
_POINTER = re.compile(r"\s+For further information visit ")


async def until_listening(child: Child, port: int, environment: str) -> None:
    """Return when the child listens on its port; `StackStartError` if it exits first."""
    pause = POLL_S
    while child.alive:
        inode = listening_inodes([port]).get(port)
        if inode is not None and owns_socket(child.pid, inode):
            return
        await asyncio.wait([child.exited], timeout=pause)
        pause = min(pause * 1.3, MAX_POLL_S)
    raise died_starting(child, environment)


async def end(spawner: ForkServerClient | None, children: Iterable[Child], grace_s: float = 0.0) -> None:
    """Kill servers and wait until they are gone, `GRACE_S` at most; ask them first if there is a grace period."""
    running = [child for child in children if child.alive]
    if spawner is None or not running:
        return
    if grace_s:
        for child in running:
            spawner.kill(child, signal.SIGINT)
        await asyncio.wait([child.exited for child in running], timeout=grace_s)
    for child in running:
        spawner.kill(child)
    await asyncio.wait([child.exited for child in running], timeout=GRACE_S)


def died(child: Child, environment: str) -> ServerDiedError:
    return ServerDiedError(
        f"server {child.name!r} of {environment!r} died ({how(child)})",
        environment=environment,
        server=child.name,
        log_tail=child.log_tail(),
    )


def died_starting(child: Child, environment: str) -> StackStartError:
    text = child.log_tail()
    reason = f": {reason_in(text)}" if text else no_room(child.log)
    return StackStartError(
        f"server {child.name!r} of {environment!r} died while starting ({how(child)}){reason}",
        environment=environment,
        server=child.name,
        log_tail=text,
    )


def reason_in(log: str) -> str:
    """What a log's end says: the last exception, whose message may have several lines, or else the last line."""
    lines = [line for line in log.splitlines() if line.strip() and not _POINTER.match(line)]
    starts = [number for number, line in enumerate(lines) if _EXCEPTION.match(line)]
    last = lines[starts[-1] :] if starts else lines[-1:]
    return " ".join(" ".join(last).split())[:MAX_REASON]


def too_slow(environment: str, timeout_s: float, awaited: Child | None) -> StackStartError:
    """For servers that do not listen in time; `awaited` is one of them."""
    return StackStartError(
        f"environment {environment!r} was not up after {timeout_s:g} s"
        + (f"; still waiting for server {awaited.name!r}" if awaited else ""),
        environment=environment,
        server=awaited.name if awaited else None,
        log_tail=awaited.log_tail() if awaited else None,
    )


def how(child: Child) -> str:
    """How a child ended, in words."""
    status = child.exited.result() if child.exited.done() else None
    if child.killed_for is not None:
        return child.killed_for
    if status is None:
        return "the fork server died"
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
