"""Tells a process that hangs from one that is busy or slow, and has it killed: its death is then handled as any other.

A process hangs if for all the time that it is given it has answered nothing, and neither it nor what it started has
used processor time. One that computes does not; one that waits for something and answers nobody meanwhile looks as if.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gymgate.stack.agent_processes import Started
from gymgate.stack.environment import Environment
from gymgate.stack.forkserver import descendants, helpers_of
from gymgate.stack.forkserver_client import ForkServerClient
from gymgate.stack.ports import LOOPBACK

EVERY_S = 10.0
"""Between looks, at most: a tenth of what a process is given, if that is less."""
FORK_SERVER_S = 60.0
"""That a fork server is given, at most: it never waits for anything but orders."""
IDLE_SHARE = 0.001
"""Of a processor: what a process may use and still count as using none."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_REQUEST = b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

logger = logging.getLogger(__name__)


class Watched(NamedTuple):
    """A process to look at."""

    process: Hashable
    """What it is known by from one look to the next."""
    pid: int
    given_s: float
    ask: Callable[[], Awaitable[object]]
    """Returns once the process has answered, whatever it said; raises if it could not be asked."""
    kill: Callable[[str], object]
    """Takes the reason, to stand in errors."""
    needed: bool = True
    """Whether anybody waits for it; otherwise it is asked nothing, and nothing is held against it."""
    alone: bool = False
    """Whether what it started has no part in this."""


@dataclass
class _Question:
    """The one that a process owes an answer to, and what has been seen since."""

    asked: asyncio.Task[object]
    silent_s: float = 0.0
    used: int | None = None
    """Processor time when last looked at, in clock ticks."""

    @property
    def is_answered(self) -> bool:
        return self.asked.done() and not self.asked.cancelled() and self.asked.exception() is None


def processes_of(
    environments: Iterable[Environment], fork_servers: Iterable[ForkServerClient], given_s: float
) -> Iterator[Watched]:
    """The processes of a stack, their servers given so many seconds."""
    for spawner in fork_servers:
        pid, given = spawner.process.pid, min(given_s, FORK_SERVER_S)
        yield Watched(spawner, pid, given, spawner.ping, spawner.kill_itself, alone=True)
    for environment in environments:
        for process, port, needed in environment.processes():
            ask, kill = partial(ask_http, port), partial(_kill, process)
            yield Watched(process.child, process.child.pid, given_s, ask, kill, needed)


def _kill(process: Started, reason: str) -> None:
    process.child.killed_for = reason
    process.spawner.kill(process.child)


class HangWatch:
    """Looks again and again at the processes that `watched` gives, from `run` until that is cancelled.

    A process has one question at a time, however long it takes to answer: however busy it is, it is asked no more.
    """

    def __init__(self, watched: Callable[[], Iterable[Watched]], given_s: float) -> None:
        self._watched = watched
        self._every_s = min(EVERY_S, given_s / 10)
        self._questions: dict[Hashable, _Question] = {}

    async def run(self) -> None:
        looked = time.monotonic()
        try:
            while True:
                await asyncio.sleep(self._every_s)
                looked, before = time.monotonic(), looked
                try:
                    # This process may have been stopped itself, and all others with it.
                    await self.look(min(looked - before, 2 * self._every_s))
                except Exception:
                    logger.exception("hang watch")
        finally:
            for question in self._questions.values():
                question.asked.cancel()

    async def look(self, passed_s: float) -> None:
        """Ask who has answered; count the seconds that have passed against who is silent and idle, and kill whose time is up."""
        watched = {each.process: each for each in self._watched()}
        for process in self._questions.keys() - watched.keys():
            self._questions.pop(process).asked.cancel()
        silent = [each for each in watched.values() if each.needed and not self._ask(each)]
        if not silent:
            return
        used = await asyncio.to_thread(lambda: [ticks_of(each.pid, alone=each.alone) for each in silent])
        for each, ticks in zip(silent, used, strict=True):
            question = self._questions[each.process]
            if question.used is None or abs(ticks - question.used) > IDLE_SHARE * _TICKS_PER_S * passed_s:
                question.silent_s = 0.0
            else:
                question.silent_s += passed_s
            question.used = ticks
            if question.silent_s >= each.given_s:
                each.kill(f"hung: no answer and no processor time for {question.silent_s:.3g} s, killed")

    def _ask(self, each: Watched) -> bool:
        """Ask, unless the last question waits for its answer; false if that is so, or it could not be put."""
        question = self._questions.get(each.process)
        if question is None or question.is_answered:
            self._questions[each.process] = _Question(_task(each.ask))
            return True
        if question.asked.done():
            question.asked = _task(each.ask)
        return False


def _task(ask: Callable[[], Awaitable[object]]) -> asyncio.Task[object]:
    async def asked() -> object:
        return await ask()

    task = asyncio.create_task(asked())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever looks next sees it
    return task


async def ask_http(port: int) -> None:
    """Return when the server on a loopback port has answered a request for nothing, with whatever status."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        writer.write(_REQUEST)
        if not await reader.readline():
            raise ConnectionResetError(f"no answer on port {port}")
    finally:
        writer.close()


def ticks_of(pid: int, *, alone: bool = False) -> int:
    """Processor time of a process and, unless alone, of what it started and still runs, in clock ticks; blocking.

    Children that have ended count as their parent's.
    """
    found = 0
    for each in {pid} if alone else {pid, *descendants(pid), *helpers_of(pid)}:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            found += sum(int(field) for field in fields[11:15])
    return found
