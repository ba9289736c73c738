"""What the fault suite shares: what is there before and after a fault, programs to do it to, and who is who in a stack."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gymgate.core.config import StackConfig
from gymgate.gym.inside.forkserver import PR_SET_CHILD_SUBREAPER, descendants, prctl
from gymgate.gym.runtime.owners import owner
from gymgate.gym.runtime.venv import MARKER
from gymgate.stack import Stack, connect
from support.stacks import alive, all_gone

TESTS = Path(__file__).parents[1]
GONE_S = 5.0
"""In which everything has to be gone when its owner is."""


def adopt_orphans() -> None:
    """Become the parent of whatever loses its own, so that an orphan is found among our descendants."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def open_files() -> dict[int, str]:
    """This process's descriptors that outlive a call: sockets, pipes, files; not what the tests' own tools hold, nor the locks
    on runtimes in use, which are held until the process ends."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[int(entry.name)] = str(entry.readlink())
    tools = ("/proc/", "/dev/", "anon_inode:")
    return {
        fd: what for fd, what in found.items() if not what.startswith(tools) and Path(what).name != MARKER
    }


def traces(runtime_directory: Path) -> set[str]:
    """Sockets and logs of stacks that are gone. Locks stay, empty, by design; so does, until this process ends, its own
    directory with what a daemon that was killed has left there."""
    base = runtime_directory / "gymgate"
    found = [*base.glob("p-*"), *base.glob("shared/*")]
    own = f"p-{owner()}-"
    return {str(path) for path in found if path.suffix != ".lock" and not path.name.startswith(own)}


KEPT: set[int] = set()
"""Daemons of stacks that several tests share; what they start is theirs."""


@contextlib.contextmanager
def held(config: StackConfig) -> Iterator[int]:
    """A stack of this process that stays, so that whoever acquires it has it at once; its daemon. Nothing of it is left after."""
    loop = asyncio.new_event_loop()
    try:
        stack = loop.run_until_complete(connect(config))
        daemon = loop.run_until_complete(stack.status())["pid"]
        KEPT.add(daemon)
        try:
            yield daemon
            pids = [daemon, *descendants(daemon)]
        finally:
            KEPT.remove(daemon)
            loop.run_until_complete(stack.close())
        assert loop.run_until_complete(all_gone(pids))
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def of_kept() -> set[int]:
    """The processes of the stacks that stay."""
    return KEPT.union(*(descendants(daemon) for daemon in KEPT))


@dataclass
class Ledger:
    """What is there; `settle` waits until no more than that is left."""

    runtime_directory: Path
    processes: set[int] = field(default_factory=lambda: set(alive(descendants(os.getpid()))))
    files: dict[int, str] = field(default_factory=open_files)

    def left(self) -> dict[str, object]:
        """What has come since and is still there."""
        gc.collect()
        known = self.processes | of_kept()
        processes = [pid for pid in alive(descendants(os.getpid())) if pid not in known]
        files = {fd: what for fd, what in open_files().items() if self.files.get(fd) != what}
        found: dict[str, object] = {"processes": {pid: command(pid) for pid in processes}}
        found |= {"files": files, "traces": traces(self.runtime_directory)}
        return {name: what for name, what in found.items() if what}

    def settle(
        self, seconds: float = GONE_S, kinds: tuple[str, ...] = ("processes", "files", "traces")
    ) -> dict[str, object]:
        """What is left, of these kinds, after so many seconds."""
        deadline = time.monotonic() + seconds
        while (
            left := {kind: what for kind, what in self.left().items() if kind in kinds}
        ) and time.monotonic() < deadline:
            time.sleep(0.02)
        bury_zombies()
        return left


def bury_zombies() -> None:
    """Those that were left to us, once they have ended."""
    for pid in set(descendants(os.getpid())) - set(alive(descendants(os.getpid()))):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def command(pid: int) -> str:
    """Of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    """Direct ones that run, oldest first."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in file.read_text().split()]
    return sorted(alive(found))


def daemon_of(pid: int) -> int | None:
    """The daemon that a process has started, if it runs."""
    return next((child for child in children(pid) if "gymgate.stack.daemon" in command(child)), None)


def fork_server_of(daemon: int) -> int | None:
    """A daemon's fork server, if it runs."""
    return next((child for child in children(daemon) if "forkserver/__main__.py" in command(child)), None)


async def until(found: Callable[[], object], seconds: float = 30.0, what: str = "it") -> None:
    """Wait for something to be so."""
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, f"{what} did not come"
        await asyncio.sleep(0.005)


async def idle(stack: Stack, seconds: float = 3.0) -> None:
    """Wait until no route and no call is open; fail if one stays."""
    deadline = time.monotonic() + seconds
    while True:
        status = await stack.status()
        if not status["rollouts"] and not status["calls"]:
            assert all(not place["rollouts"] for place in status["environments"].values())
            return
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.02)


PRELUDE = """
import asyncio, os, signal, sys, time
from support.stacks import *
from gymgate.core.config import RolloutLimits
from gymgate.core.errors import *
from gymgate.stack import acquire, acquire_sync, connect

def say(*words):
    print(*words, flush=True)
"""


class Program:
    """A Python program that uses gymgate, as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid

    async def line(self, seconds: float = 60.0) -> str:
        """The next line that it prints; empty at the end."""
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), seconds)).decode().strip()

    async def until_line(self, start: str, seconds: float = 60.0) -> str:
        """The next line that begins so."""
        while not (line := await self.line(seconds)).startswith(start):
            assert self.process.returncode is None or line, f"ended before {start!r}"
        return line

    async def numbers(self) -> list[int]:
        """Those on the next line."""
        return [int(word) for word in (await self.line()).split()]

    async def ended(self, seconds: float) -> int:
        """Its exit status, which has to come in so many seconds."""
        return await asyncio.wait_for(self.process.wait(), seconds)

    def signal(self, number: int) -> None:
        """Send it a signal, if it is there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@contextlib.asynccontextmanager
async def program(
    code: str, *arguments: object, quiet: bool = True, wrap: Iterable[str] = (), **environment: str
) -> AsyncIterator[Program]:
    """Run a program, `PRELUDE` in front; it is killed at the end of the block if it still runs."""
    first = environment.pop("PYTHONPATH_FIRST", "")
    paths = [first, str(TESTS), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    process = await asyncio.create_subprocess_exec(
        *[*wrap, sys.executable, "-c", PRELUDE + code, *map(str, arguments)],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL if quiet else None,
        env=variables,
    )
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
        await process.communicate()


__all__ = ["all_gone"]
