"""Servers as processes: started together, waited for with a deadline, started again when they die, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

from gymgate.errors import GymgateError, ServerDiedError, StackStartError
from gymgate.files import tail
from gymgate.gateway.backends.ready import answers
from gymgate.http_client import HTTPClient
from gymgate.serving.servers import Server
from gymgate.stack.forkserver.processes import PR_SET_PDEATHSIG, prctl

Say = Callable[[str], None]
POLL_S = 0.1
REMIND_S = 30.0
GRACE_S = 15.0
"""For a server to end after TERM."""
LONGEST_PAUSE_S = 30.0
TAIL = 2000


class Supervised:
    """One server's process, and those that take its place."""

    def __init__(self, server: Server, log: IO[bytes]) -> None:
        self.server = server
        self.restarts = 0
        self.was_ready = False
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises `StackStartError` if its program cannot be run."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.server.argv,
                env={**os.environ, **dict(self.server.environment)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            program = self.server.argv[0]
            raise StackStartError(
                f"{self.server.name}: cannot run {program!r}: {error.strerror}; install it, or name another --command",
                server=self.server.name,
            ) from error

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """TERM, a while, then KILL to the whole process group; idempotent."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await process.wait()
        self._signal(signal.SIGKILL)
        await process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def tail(self) -> str:
        """The end of what it and those before it wrote."""
        return tail(Path(self._log.name), size=TAIL).strip()


class Supervisor:
    """All servers; `ready` and `watch` raise what one of them ended with."""

    def __init__(self, supervised: Sequence[Supervised], restarts: int, say: Say) -> None:
        self.supervised = supervised
        self._restarts = restarts
        self._say = say

    async def ready(self, within_s: float) -> None:
        """Until each answers. Raises `StackStartError` for one that ended, or has not answered by then."""
        async with alone(self._end_is_error(each) for each in self.supervised), alone([self._remind()]):
            try:
                async with (
                    asyncio.timeout(within_s),
                    HTTPClient() as client,
                    asyncio.TaskGroup() as group,
                ):
                    for each in self.supervised:
                        group.create_task(self._until_ready(each, client))
            except TimeoutError:
                raise self._late(within_s) from None

    async def watch(self) -> None:
        """Start a server that ends again, with growing pauses, so many times; then raise `ServerDiedError`."""
        async with alone(self._keep_up(each) for each in self.supervised):
            await asyncio.get_running_loop().create_future()

    async def _keep_up(self, each: Supervised) -> None:
        while True:
            code = await each.ended()
            if each.restarts >= self._restarts:
                raise self._died(each, code)
            each.restarts += 1
            pause = min(2.0 ** (each.restarts - 1), LONGEST_PAUSE_S)
            self._say(
                f"{each.server.name} ended with {_code(code)}; starting it again in {pause:g} s "
                f"({each.restarts} of {self._restarts})"
            )
            await each.stop()
            await asyncio.sleep(pause)
            await each.start()

    async def _until_ready(self, each: Supervised, client: HTTPClient) -> None:
        while True:
            if await answers(each.server.probe, client):
                break
            await asyncio.sleep(POLL_S)
        each.was_ready = True
        self._say(f"{each.server.name} answers at {each.server.url}")

    async def _end_is_error(self, each: Supervised) -> None:
        raise self._died(each, await each.ended())

    async def _remind(self) -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(REMIND_S)
            waiting = [
                f"{each.server.name} ({each.server.probe})" for each in self.supervised if not each.was_ready
            ]
            self._say(f"waiting for {', '.join(waiting)} since {time.monotonic() - started:.0f} s")

    def _late(self, within_s: float) -> StackStartError:
        late = [each for each in self.supervised if not each.was_ready]
        named = ", ".join(f"{each.server.name} ({each.server.probe})" for each in late)
        message = f"no answer after {within_s:g} s from {named}; give it longer with --wait{_said(late[0])}"
        return StackStartError(message, server=late[0].server.name, log_tail=late[0].tail())

    def _died(self, each: Supervised, code: int) -> GymgateError:
        when = f"after {each.restarts} restarts" if each.was_ready else "before it answered"
        message = f"{each.server.name} ended with {_code(code)} {when}{_said(each)}"
        error = ServerDiedError if each.was_ready else StackStartError
        return error(message, server=each.server.name, log_tail=each.tail())


@asynccontextmanager
async def supervise(
    servers: Sequence[Server], logs: Path, *, restarts: int = 3, say: Say = lambda message: None
) -> AsyncIterator[Supervisor]:
    """Start servers; end them, and all that they started, on leaving. Their output goes to `logs`/NAME.log."""
    async with contextlib.AsyncExitStack() as exits:
        supervised = []
        for server in servers:
            log = exits.enter_context((logs / f"{server.name}.log").open("ab"))
            supervised.append(Supervised(server, log))
        exits.push_async_callback(_stop_all, supervised)
        for each in supervised:
            await each.start()
        yield Supervisor(supervised, restarts, say)


@asynccontextmanager
async def alone(work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Work beside the body, cancelled when that is done; the first error of either ends both, as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _stop_all(supervised: Sequence[Supervised]) -> None:
    await asyncio.gather(*(each.stop() for each in supervised))


def die_with_parent() -> None:
    """In the child: a supervisor that is killed takes its servers with it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _code(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _said(each: Supervised) -> str:
    """The last line that it wrote."""
    lines = each.tail().splitlines()
    return f"; it said last: {lines[-1][:300]}" if lines else ""
