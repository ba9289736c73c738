"""Child processes that serve: started together, awaited with a deadline, restarted when they die, and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from gymgate.cluster.servers import Server
from gymgate.core.errors import GymgateError, ServerDiedError, StackStartError
from gymgate.core.files import tail
from gymgate.core.http_client import HTTPClient, Response
from gymgate.core.json_server import probe
from gymgate.core.task_groups import beside
from gymgate.gym.inside.processes import PR_SET_PDEATHSIG, prctl
from gymgate.gym.runtime.command import Progress
from gymgate.stack.restarts import Restarts

POLL_S = 0.1
REMIND_S = 30.0
GRACE_S = 15.0
"""Time that a server has to end after TERM."""
RESTART_WINDOW_S = 86400.0
"""Time for which a restart counts: a server that dies once a week is kept up, one that dies at each start is not."""
TAIL = 2000


def _end_with_parent() -> None:
    """In the child: the kernel sends it TERM when this process dies, however it dies."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class ChildProcess:
    """A program in a session of its own, so that a terminal's Ctrl-C does not reach it. It ends when this process does."""

    def __init__(
        self, argv: Sequence[str], variables: Mapping[str, str], output: IO[bytes] | None = None
    ) -> None:
        self._argv = argv
        self._variables = variables
        self._output = output
        """File for its stdout and stderr; `None`: this process's own."""
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it, also again. Raises `OSError` if the program cannot be run."""
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            env={**os.environ, **self._variables},
            stdin=None if self._output is None else asyncio.subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    async def wait(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the program, or to its whole process group."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number) if group else self._process.send_signal(number)

    async def stop(self, grace_s: float, *, group: bool = False) -> None:
        """Send TERM to it, or to its group, and after `grace_s` KILL to whatever is left of its group. Idempotent."""
        if self._process is None:
            return
        if self.running:
            self.signal(signal.SIGTERM, group=group)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.wait()
        # Also after its own end: what it started (vLLM's workers) may live on, and hold its GPUs.
        self.signal(signal.SIGKILL, group=True)
        await self.wait()


class ServerProcess(ChildProcess):
    """A server's process, started again when it dies; its output goes to `log`."""

    def __init__(self, server: Server, log: IO[bytes], restarts: int) -> None:
        super().__init__(server.argv, dict(server.environment), log)
        self.server = server
        self.restarts = Restarts(restarts, RESTART_WINDOW_S)
        self.was_ready = False
        self._log = Path(log.name)

    async def start(self) -> None:
        """Raises `StackStartError` if its program cannot be run."""
        try:
            await super().start()
        except OSError as error:
            program = self.server.argv[0]
            raise StackStartError(
                f"{self.server.name}: cannot run {program!r}: {error.strerror}; install it, or give another --command",
                server=self.server.name,
            ) from error

    def tail(self) -> str:
        """Return the end of its output, and of the output before its restarts."""
        return tail(self._log, size=TAIL).strip()

    @property
    def last_line(self) -> str:
        """The end of an error message: the last line of its output."""
        lines = self.tail().splitlines()
        return f"; its last line of output: {lines[-1][:300]}" if lines else ""

    def exit_error(self, code: int) -> GymgateError:
        """The error for a server that ended with `code`."""
        when = f"after {self.restarts.recent} restarts" if self.was_ready else "before it answered"
        message = f"{self.server.name} ended with {_code(code)} {when}{self.last_line}"
        error = ServerDiedError if self.was_ready else StackStartError
        return error(message, server=self.server.name, log_tail=self.tail())


class Supervisor:
    """Waits for all servers, and restarts them."""

    def __init__(self, servers: Sequence[ServerProcess], progress: Progress) -> None:
        self._servers = servers
        self._progress = progress

    async def ready(self, within_s: float) -> None:
        """Wait until every server answers. Raises `StackStartError` for one that ended, or has not answered in time."""
        async with beside(self._raise_at_end(process) for process in self._servers), beside([self._remind()]):
            try:
                async with (
                    asyncio.timeout(within_s),
                    HTTPClient() as client,
                    asyncio.TaskGroup() as group,
                ):
                    for process in self._servers:
                        group.create_task(self._until_ready(process, client))
            except TimeoutError:
                late = next(process for process in self._servers if not process.was_ready)
                raise StackStartError(
                    f"no answer after {within_s:g} s from {self._waiting()}; wait longer with --start-timeout{late.last_line}",
                    server=late.server.name,
                    log_tail=late.tail(),
                ) from None

    async def watch(self) -> None:
        """Restart servers that end, after growing pauses; raise `ServerDiedError` when one has no restarts left."""
        async with beside(self._keep_up(process) for process in self._servers):
            await asyncio.get_running_loop().create_future()

    async def _keep_up(self, process: ServerProcess) -> None:
        while True:
            code = await process.wait()
            if (pause := process.restarts.next_wait()) is None:
                raise process.exit_error(code)
            self._progress(
                f"{process.server.name} ended with {_code(code)}; restarting it in {pause:g} s "
                f"({process.restarts.recent} of {process.restarts.limit})"
            )
            await process.stop(GRACE_S, group=True)
            await asyncio.sleep(pause)
            await process.start()

    async def _until_ready(self, process: ServerProcess, client: HTTPClient) -> None:
        while True:
            # Anything but a status of 5xx is an answer, also a refusal (a missing key).
            if isinstance(await probe(process.server.probe, client), Response):
                break
            await asyncio.sleep(POLL_S)
        process.was_ready = True
        self._progress(f"{process.server.name} answers at {process.server.url}")

    async def _raise_at_end(self, process: ServerProcess) -> None:
        raise process.exit_error(await process.wait())

    async def _remind(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(REMIND_S)
            self._progress(f"waiting for {self._waiting()} since {time.monotonic() - started:.0f} s")

    def _waiting(self) -> str:
        """Names and addresses of the servers that have not answered yet."""
        late = [process.server for process in self._servers if not process.was_ready]
        return ", ".join(f"{server.name} ({server.probe})" for server in late)


@asynccontextmanager
async def supervise(
    servers: Sequence[Server], logs: Path, *, restarts: int = 3, progress: Progress = lambda message: None
) -> AsyncIterator[Supervisor]:
    """Start servers; on leaving, end them and all that they started. Their output goes to `logs`/NAME.log.

    A server that ends is started again, at most `restarts` times within a day.
    """
    async with contextlib.AsyncExitStack() as exits:
        processes = [
            ServerProcess(server, exits.enter_context((logs / f"{server.name}.log").open("ab")), restarts)
            for server in servers
        ]

        async def stop_all() -> None:
            await asyncio.gather(*(process.stop(GRACE_S, group=True) for process in processes))

        exits.push_async_callback(stop_all)
        for process in processes:  # only now: one that cannot be started must find the others ended, too
            await process.start()
        yield Supervisor(processes, progress)


def _code(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
