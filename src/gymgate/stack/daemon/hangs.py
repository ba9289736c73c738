"""Finds processes that hang and has them killed; their death is then handled like any other.

A process hangs if, for its whole timeout (from `StackConfig.hang_timeout_s`), it has answered nothing and neither it nor
what it started has used CPU time. A process that computes does not hang. One that blocks on something and answers nobody
meanwhile cannot be told from a hung one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from gymgate.gym.inside.forkserver import descendants, helpers_of, stat
from gymgate.stack.daemon.forkserver_client import ForkServerClient
from gymgate.stack.daemon.running_environment import RunningEnvironment
from gymgate.stack.ports import until_answer

MAX_INTERVAL_S = 10.0
"""Between looks; a tenth of the timeout, if that is less."""
FORK_SERVER_S = 60.0
"""Longest timeout of a fork server, which never waits for anything but orders."""
IDLE_SHARE = 0.001
"""Share of a processor that counts as using none."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

logger = logging.getLogger(__name__)


class Watched(NamedTuple):
    """A process to look at."""

    process: Hashable
    """Identifies it from one look to the next."""
    pid: int
    timeout_s: float
    ask: Callable[[], Coroutine[Any, Any, object]]
    """Returns once the process has answered anything; raises if it could not be asked."""
    kill: Callable[[str], object]
    """Takes the reason, for errors."""
    needed: bool = True
    """Whether anybody waits for it. Otherwise it is not asked, and its time does not run."""
    alone: bool = False
    """Whether to leave out the CPU time of what it started."""


@dataclass
class _Question:
    """The question that a process has to answer, and what has been seen since."""

    asked: asyncio.Task[object]
    silent_s: float = 0.0
    used: int | None = None
    """CPU time at the last look, in clock ticks."""

    @property
    def is_answered(self) -> bool:
        return self.asked.done() and not self.asked.cancelled() and self.asked.exception() is None


def processes_of(
    environments: Iterable[RunningEnvironment], fork_servers: Iterable[ForkServerClient], timeout_s: float
) -> Iterator[Watched]:
    """Yield the processes of a stack; `timeout_s` is that of its servers."""
    for server in fork_servers:
        timeout = min(timeout_s, FORK_SERVER_S)
        yield Watched(server, server.process.pid, timeout, server.ping, server.kill_itself, alone=True)
    for environment in environments:
        for child, port, needed in environment.processes_to_watch():
            ask, kill = partial(until_answer, port), partial(child.kill, signal.SIGKILL)
            yield Watched(child, child.pid, timeout_s, ask, kill, needed)


class HangWatch:
    """Looks at the processes that `watched` returns, again and again, from `run` until that is cancelled.

    A process has at most one open question, so a busy one is not flooded with questions.
    """

    def __init__(self, watched: Callable[[], Iterable[Watched]], timeout_s: float) -> None:
        self._watched = watched
        self._every_s = min(MAX_INTERVAL_S, timeout_s / 10)
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
        """Ask the processes that have answered, add the seconds passed to silent and idle ones, and kill at the timeout."""
        watched = {server.process: server for server in self._watched()}
        for process in self._questions.keys() - watched.keys():
            self._questions.pop(process).asked.cancel()
        silent = [server for server in watched.values() if server.needed and not self._ask(server)]
        if not silent:
            return
        used = await asyncio.to_thread(
            lambda: [ticks_of(server.pid, alone=server.alone) for server in silent]
        )
        for server, ticks in zip(silent, used, strict=True):
            question = self._questions[server.process]
            if question.used is None or abs(ticks - question.used) > IDLE_SHARE * _TICKS_PER_S * passed_s:
                question.silent_s = 0.0
            else:
                question.silent_s += passed_s
            question.used = ticks
            if question.silent_s >= server.timeout_s:
                server.kill(f"hung: no answer and no CPU time for {question.silent_s:.3g} s, killed")

    def _ask(self, server: Watched) -> bool:
        """Ask a process, unless its last question is open; false if that is so, or if it could not be asked last time."""
        question = self._questions.get(server.process)
        if question is None or question.is_answered:
            self._questions[server.process] = _Question(_send(server))
            return True
        if question.asked.done():
            question.asked = _send(server)
        return False


def _send(server: Watched) -> asyncio.Task[object]:
    task = asyncio.create_task(server.ask())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the next look reads it
    return task


def ticks_of(pid: int, *, alone: bool = False) -> int:
    """Return the CPU time of a process and, unless `alone`, of what it started, in clock ticks. Blocks.

    Time of children that have ended counts as their parent's.
    """
    ticks = 0
    for process in {pid} if alone else {pid, *descendants(pid), *helpers_of(pid)}:
        with contextlib.suppress(OSError):
            ticks += sum(int(field) for field in stat(process)[11:15])
    return ticks
