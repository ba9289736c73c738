"""Who counts as hung: real processes that answer, wait, compute, stop and go on; the time between looks is the test's."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.gym.inside.forkserver import stat
from gymgate.stack.daemon import hangs
from gymgate.stack.daemon.hangs import HangWatch, Watched, processes_of, ticks_of
from gymgate.stack.ports import until_answer

PROGRAM = """
import signal, socket, subprocess, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
burn = "while True: pass"
match sys.argv[1]:
    case "answers":
        while True:
            client, _ = server.accept()
            client.recv(4096)
            client.sendall(b"HTTP/1.1 404 Not Found\\r\\n\\r\\n")
            client.close()
    case "waits":
        time.sleep(600)
    case "computes when told":
        def compute(*_):
            end = time.process_time() + 0.3
            while time.process_time() < end: pass
            print("done", flush=True)
        signal.signal(signal.SIGUSR1, compute)
        print("ready", flush=True)
        time.sleep(600)
    case "computes":
        exec(burn)
    case "lets compute":
        with subprocess.Popen([sys.executable, "-c", burn], start_new_session=True) as child:
            print(child.pid, flush=True)
    case "breaks off":
        while True:
            server.accept()[0].close()
"""
GIVEN_S = 100.0
"""Long enough that what it takes to accept a connection, a tick of 10 ms at times, counts as no processor time."""


class Process:
    """A process that listens, looked at by a watch."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, kind: str) -> None:
        self.process = process
        self.pid = process.pid
        self.needed, self.alone, self.asked = True, False, 0
        self.replies = kind in ("answers", "breaks off")
        self.reasons: list[str] = []
        """What it would have been killed for."""
        self.watch = HangWatch(self.watched, GIVEN_S)
        self._port = port

    def watched(self) -> list[Watched]:
        return [
            Watched(self, self.pid, GIVEN_S, self.ask, self.reasons.append, self.needed, alone=self.alone)
        ]

    async def ask(self) -> None:
        self.asked += 1
        await until_answer(self._port)

    async def looks(self, count: int, passed_s: float = GIVEN_S / 2) -> None:
        """So many looks; one that replies is given the time for it between them."""
        for _ in range(count):
            await self.watch.look(passed_s)
            if (question := self.watch._questions.get(self)) is not None:
                await asyncio.wait([question.asked], timeout=20 if self.replies else 0.1)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        self.replies = False

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.replies = True

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), 20)).decode().strip()


@asynccontextmanager
async def program(kind: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, kind, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    found = Process(process, int(await asyncio.wait_for(process.stdout.readline(), 20)), kind)
    try:
        yield found
    finally:
        for question in found.watch._questions.values():
            question.asked.cancel()
        process.kill()
        await process.communicate()


async def grows(pid: int) -> None:
    """Wait until a process, with what it started, has used a tenth of a second of a processor."""
    before = ticks_of(pid)
    while ticks_of(pid) < before + 10:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_one_that_answers_is_asked_again_and_again() -> None:
    async with program("answers") as process:
        await process.looks(5)
        assert (process.asked, process.reasons) == (5, [])


@pytest.mark.parametrize("kind", ["waits", "breaks off"])
async def test_one_that_neither_answers_nor_computes_hangs(kind: str) -> None:
    async with program(kind) as process:
        await process.looks(3)
        assert process.reasons == []  # asked; seen silent; silent and idle for 50 s
        await process.looks(1)
        (reason,) = process.reasons
        assert reason.startswith("hung: ")
        assert " 100 s" in reason
        assert process.asked == (1 if kind == "waits" else 4)


async def test_one_that_is_stopped_and_goes_on() -> None:
    """What it answers late is an answer."""
    async with program("answers") as process:
        await process.looks(1)
        process.stop()
        await process.looks(3)
        assert (process.asked, process.reasons) == (2, [])
        process.go_on()
        await asyncio.wait_for(process.watch._questions[process].asked, 20)
        await process.looks(3)
        process.stop()
        await process.looks(3)
        assert process.reasons == []
        await process.looks(1)
        assert len(process.reasons) == 1


async def test_one_that_computes_is_busy() -> None:
    async with program("computes") as process:
        for _ in range(5):
            await grows(process.pid)
            await process.looks(1)
        assert (process.asked, process.reasons) == (1, [])


async def test_one_that_computes_in_between_begins_anew() -> None:
    async with program("computes when told") as process:
        assert await process.line() == "ready"
        await process.looks(3)
        os.kill(process.pid, signal.SIGUSR1)
        assert await process.line() == "done"
        await process.looks(2)
        assert process.reasons == []  # seen busy; silent and idle for 50 s
        await process.looks(1)
        assert len(process.reasons) == 1


async def test_what_it_started_counts_unless_it_is_looked_at_alone() -> None:
    async with program("lets compute") as process:
        child = int(await process.line())
        try:
            for _ in range(5):
                await grows(process.pid)
                await process.looks(1)
            assert process.reasons == []
            process.alone = True
            await process.looks(3)
            assert len(process.reasons) == 1
        finally:
            os.kill(child, signal.SIGKILL)


async def test_a_tick_now_and_then_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ticks in 50 s are idle where 120 make a second, which is less than a thousandth, and work where 50 do."""
    used = itertools.count(0, 5)
    monkeypatch.setattr(hangs, "ticks_of", lambda pid, alone: next(used))
    async with program("waits") as process:
        monkeypatch.setattr(hangs, "_TICKS_PER_S", 120)
        await process.looks(4)
        assert len(process.reasons) == 1
    async with program("waits") as process:
        monkeypatch.setattr(hangs, "_TICKS_PER_S", 50)
        await process.looks(6)
        assert process.reasons == []


async def test_what_a_program_used_counts_after_its_end() -> None:
    """Servers run programs one after the other, each of which is gone at the next look."""
    compute = "import time\nwhile time.process_time() < 0.2: pass"
    runs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {compute!r}]); print(); input()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", runs, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        await asyncio.wait_for(process.stdout.readline(), 20)
        own = sum(int(field) for field in stat(process.pid)[11:13])
        assert ticks_of(process.pid, alone=True) >= own + 15
    finally:
        process.kill()
        await process.communicate()


async def test_a_question_to_one_that_is_gone_is_dropped() -> None:
    async with program("waits") as process:
        await process.looks(1)
        question = process.watch._questions[process].asked
        process.watched = list  # type: ignore[method-assign, assignment]
        process.watch._watched = list
        await process.watch.look(GIVEN_S)
        await asyncio.wait([question], timeout=20)
        assert question.cancelled()


def test_a_fork_server_waits_for_nothing_but_orders() -> None:
    fork_server: Any = SimpleNamespace(process=SimpleNamespace(pid=1), ping=None, kill_itself=None)
    for timeout_s, given_s in ((900.0, hangs.FORK_SERVER_S), (5.0, 5.0)):
        (watched,) = processes_of([], [fork_server], timeout_s)
        assert (watched.timeout_s, watched.alone) == (given_s, True)


async def test_nothing_is_held_against_one_that_nobody_needs() -> None:
    """Nor forgotten: time goes on where it stood when somebody needs it again."""
    async with program("waits") as process:
        process.needed = False
        await process.looks(5)
        assert process.asked == 0
        process.needed = True
        await process.looks(3)
        process.needed = False
        await process.looks(3)
        assert process.reasons == []
        process.needed = True
        await process.looks(1)
        assert len(process.reasons) == 1


async def test_a_watch_that_was_stopped_itself_blames_nobody() -> None:
    """As in a machine that slept: of the time that passed it counts two turns."""
    async with program("waits") as process:
        watch = HangWatch(process.watched, GIVEN_S)
        watch._every_s = 0.05
        watching = asyncio.create_task(watch.run())
        while not (question := watch._questions.get(process)) or not question.silent_s:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        before = question.silent_s
        time.sleep(1)  # noqa: ASYNC251
        while question.silent_s == before:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert question.silent_s == pytest.approx(before + 0.1, abs=0.01)
        assert process.reasons == []
        watching.cancel()
        await asyncio.wait([watching])
