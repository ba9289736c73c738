"""A run logged to an experiment tracker: wandb, mlflow or trackio, as far as it is installed.

The library works in a process of its own (`trackers`), which gets a line for each rollout. So what it does, such as hang
without a network, ask for a login, print, or hook the end of the process, can neither slow the run nor end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import gymgate
from gymgate.core import codec
from gymgate.core.errors import MissingExtraError
from gymgate.core.json_server import shortened
from gymgate.results.trackers import END_S
from gymgate.runs.aggregate import Runs
from gymgate.runs.record import CollectedRollout
from gymgate.runs.run import Collection
from gymgate.runs.settings import LOGIN, extent_of, shown_settings
from gymgate.runs.tasks import ANSWER_KEYS, short_answer

START_S = 120.0
"""Seconds that a library has to start its run."""
NOTICE_S = 2.0
"""Seconds of waiting at the end until a message says so."""
MAX_PENDING = 16 << 20
"""Bytes of lines that may wait for it."""


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

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message without waiting until it is read; before the first one, start the library."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
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
        command = [sys.executable, "-P", "-m", "gymgate.results.trackers", self._library]
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
        if pipe.transport.get_write_buffer_size() > MAX_PENDING:
            self._give_up("it takes no more messages")

    async def _read_answers(self, answers: asyncio.StreamReader) -> None:
        async for line in answers:
            answer = codec.loads_object(line)
            if "started" in answer and self._late is not None:
                self._late.cancel()
                self._log(f"logging to {self._library}: {LOGIN.sub('', answer['started'])}")
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
        reason = LOGIN.sub("", shortened(reason)).rstrip(".")
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
    library: str, runs: Runs, rows: Sequence[Mapping[str, Any]], log: Callable[[str], None]
) -> None:
    """Log the settings of stored runs, those of the first one, and the rows of their table."""
    paths = [str(path) for path in runs.given]
    tracked = Tracking(library, ", ".join(paths), {**runs.runs[0].settings, "runs": paths}, log)
    await tracked.send({})
    await tracked.close({"end": "completed", "rows": rows})


class RunTracking(Tracking):
    """The tracking of a run under way, from its first rollout on."""

    def __init__(self, library: str, run: Collection) -> None:
        name = str(run.directory or ", ".join(environment.name for environment in run.stack.environments))
        settings = {**run.settings(), "extent": extent_of(run.plan), "gymgate": gymgate.__version__}
        super().__init__(library, name, settings, run.log)
        self._first["directory"] = None if run.directory is None else str(run.directory.absolute())
        self._progress = run.progress

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close({"end": "completed" if kind is None else "failed"})

    async def add(self, rollout: CollectedRollout) -> None:
        """Log a rollout that finished or failed permanently, and how the run goes."""
        progress = self._progress
        answers = {
            name: short_answer(value) for name, value in (rollout.result or {}).items() if name in ANSWER_KEYS
        }
        await self.send(
            {
                "rollout": {
                    **rollout.identity._asdict(),
                    "environment": rollout.environment,
                    "status": rollout.status,
                    "reward": rollout.reward,
                    "error": rollout.error and {"kind": rollout.error.kind},
                    "result": answers,
                },
                "progress": {
                    "rollouts": progress.done,
                    "failed": progress.given_up_before + progress.failed,
                    "failed_attempts": progress.attempts_failed,
                    "output_tokens": progress.output_tokens,
                    "rollouts_per_s": progress.rate,
                    "output_tokens_per_s": progress.token_rate,
                },
            }
        )
