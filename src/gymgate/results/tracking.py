"""A run logged to an experiment tracker: wandb, mlflow or trackio, as far as it is installed.

The library works in a process of its own (`trackers`), which gets the run's metrics every few seconds. So what it does, such
as hang without a network, ask for a login, print, or hook the end of the process, can neither slow the run nor end it.

A daemon thread would not do. What a library registers with `atexit`, and the threads of its executors, hold up the end of the
process that imported it, whichever thread called it, and only `os._exit` ends that wait: it would also skip everybody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import gymgate
from gymgate.core import codec
from gymgate.core.addresses import without_login
from gymgate.core.errors import MissingExtraError, described
from gymgate.core.interpreter import module_command
from gymgate.core.json_server import shortened
from gymgate.results.trackers import END_S
from gymgate.runs.collected.progress import RunProgress
from gymgate.runs.collected.run import Collection
from gymgate.runs.counted.aggregate import RunTable
from gymgate.runs.counted.metrics import numbered, summary_rows
from gymgate.runs.described.settings import extent_of, shown_settings
from gymgate.runs.stored.record import CollectedRollout

START_S = 120.0
"""Seconds that a library has to start its run."""
NOTICE_S = 2.0
"""Seconds of waiting at the end until a message says so."""
LOG_S = 5.0
"""Seconds between two logs of the metrics, or more where computing them takes long."""
SHARE = 50
"""Computing metrics is followed by a pause this many times as long, so that a large run loses a fiftieth of its time at most."""


def require_tracker(library: str) -> str:
    """Return the library. Raises `MissingExtraError` with the command that installs it."""
    if importlib.util.find_spec(library) is None:
        raise MissingExtraError(f"--log-to {library} needs a package: pip install {library}")
    return library


class Tracking:
    """Sends what happens in a run to its tracker. If that fails, one line says so, and nothing more is sent."""

    def __init__(
        self, library: str, name: str, settings: Mapping[str, Any], log: Callable[[str], None]
    ) -> None:
        self._library = library
        known = {key: value for key, value in shown_settings(settings).items() if value is not None}
        self._first: dict[str, Any] = {"name": name, "settings": known}
        self._log = log
        self._starting: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._late: asyncio.TimerHandle | None = None
        self._printed = b""
        """The end of what the library printed."""
        self._done = False
        self._failed = False

    async def start(self) -> None:
        """Start the library. Idempotent."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, unless earlier ones still wait for the library: later metrics replace them."""
        if self._process is not None and not self._failed:
            assert self._process.stdin is not None
            if not self._process.stdin.transport.get_write_buffer_size():
                self._write(message)

    async def close(self, message: Mapping[str, Any]) -> None:
        """Send the last message, and wait until the library has sent everything, for at most `END_S` seconds."""
        if self._starting is None:
            return
        await self._starting
        if self._process is None:
            return
        notice = f"waiting for {self._library}, for at most {END_S:g} s"
        waiting = asyncio.get_running_loop().call_later(NOTICE_S, self._log, notice)
        try:
            self._write(message)
            if not self._failed:
                assert self._process.stdin is not None
                self._process.stdin.close()
                async with asyncio.timeout(END_S):
                    await self._process.wait()
        except TimeoutError:
            self._give_up(f"it was not done {END_S:g} s after the end, and what it had not sent is lost")
        finally:
            waiting.cancel()
            if not self._failed:
                self._kill()
            await self._process.wait()
            await asyncio.wait(self._readers, timeout=1)
            for reader in self._readers:
                reader.cancel()

    async def _start(self) -> None:
        command = module_command("gymgate.results.trackers", self._library)
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            self._give_up(f"cannot start it: {error.strerror}")
            return
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._readers = [
            asyncio.create_task(self._read_answers(process.stdout)),
            asyncio.create_task(self._read_errors(process.stderr)),
        ]
        reason = f"it did not start within {START_S:g} s"
        self._late = asyncio.get_running_loop().call_later(START_S, self._give_up, reason)
        self._write(self._first)

    def _write(self, message: Mapping[str, Any]) -> None:
        if self._process is None or self._failed:
            return
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(codec.dumps(message) + b"\n")

    async def _read_answers(self, answers: asyncio.StreamReader) -> None:
        async for line in answers:
            answer = codec.loads_object(line)
            if "started" in answer and self._late is not None:
                self._late.cancel()
                self._log(f"logging to {self._library}: {without_login(answer['started'])}")
            elif "failed" in answer:
                self._give_up(answer["failed"])
            self._done |= "done" in answer
        if not self._done:
            await asyncio.wait(self._readers[1:], timeout=1)
            lines = self._printed.decode(errors="replace").strip().splitlines()
            self._give_up(f"it ended: {lines[-1] if lines else 'it gives no reason'}")

    async def _read_errors(self, errors: asyncio.StreamReader) -> None:
        while chunk := await errors.read(4096):
            self._printed = (self._printed + chunk)[-4096:]

    def _give_up(self, reason: str) -> None:
        if self._failed:
            return
        self._failed = True
        reason = without_login(shortened(reason)).rstrip(".")
        self._log(f"warning: --log-to {self._library}: {reason}; the run goes on without it")
        self._kill()

    def _kill(self) -> None:
        """End it and what it started: once, when it gives up or ends, as its number may be another's long after."""
        if self._late is not None:
            self._late.cancel()
        if self._process is not None:  # also one that has ended: it may have left others in its session
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def log_stored(
    library: str, table: RunTable, rows: Sequence[Mapping[str, Any]], log: Callable[[str], None]
) -> None:
    """Log the settings of stored runs, those of the first one, and the rows of their table."""
    paths = [str(path) for path in table.paths]
    tracked = Tracking(library, ", ".join(paths), {**table.runs[0].settings, "runs": paths}, log)
    await tracked.start()
    await tracked.close({"end": "completed", "summary": summary_of(rows)})


class RunTracking(Tracking):
    """The tracking of a run under way, from its first rollout on."""

    def __init__(self, library: str, run: Collection) -> None:
        name = str(run.directory or ", ".join(environment.name for environment in run.stack.environments))
        settings = {**run.settings(), "extent": extent_of(run.plan), "gymgate": gymgate.__version__}
        super().__init__(library, name, settings, run.log)
        self._progress = run.progress
        self._changed = asyncio.Event()
        self._logging: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._logging = asyncio.create_task(self._log_regularly())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._logging is not None
        self._logging.cancel()
        await asyncio.wait([self._logging])
        if self._changed.is_set():
            await self.start()
        await self.close({**log_message(self._progress), "end": "completed" if kind is None else "failed"})

    def add(self, rollout: CollectedRollout) -> None:
        """Log soon how the run goes: a rollout finished or failed permanently."""
        self._changed.set()

    async def _log_regularly(self) -> None:
        while await self._changed.wait():
            await self.start()
            self._changed.clear()
            began = time.monotonic()
            try:
                # Tasks grow meanwhile, in ways that `summary_rows` reads without harm.
                self.send(await asyncio.to_thread(log_message, self._progress))
            except Exception as error:  # a run does not end for its tracker
                return self._give_up(described(error))
            await asyncio.sleep(max(LOG_S, SHARE * (time.monotonic() - began)))
        return None


def log_message(progress: RunProgress) -> dict[str, Any]:
    """Return how a run goes, the mean reward and pass@k of each environment, and its table as the summary so far."""
    rows = summary_rows(progress.tasks)
    names = ["mean_reward", *numbered("pass@", rows)]
    metrics = {
        "rollouts": progress.done,
        "failed": progress.given_up_before + progress.failed,
        "failed_attempts": progress.attempts_failed,
        "output_tokens": progress.output_tokens,
        "cached_share": progress.cached_share,
        "rollouts_per_s": progress.rate,
        "output_tokens_per_s": progress.token_rate,
        **{f"{row['environment']}/{name}": row.get(name) for row in rows for name in names},
    }
    return {"metrics": _numbers(metrics), "step": progress.done, "summary": summary_of(rows)}


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the numbers of a table, each with the environment of its row."""
    return _numbers({f"{row['environment']}/{name}": value for row in rows for name, value in row.items()})


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers: the libraries refuse others, or show them as text."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
