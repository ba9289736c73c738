"""Run a command with a deadline; what is left of it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

Progress = Callable[[str], None]
"""Called with each line of progress; one that starts with `warning: ` is a warning."""

_DRAIN_S = 1.0
"""How long to read on after the command has ended: a process that it started may keep stderr open."""
_KILL_TIMEOUT_S = 10.0
"""Time that a killed command has to end: one in the middle of a call to a dead file system does not."""


class CommandError(Exception):
    """A command did not start, did not end in time, or ended with a status other than 0; the message says which."""

    def __init__(self, reason: str, errors: str = "") -> None:
        super().__init__(reason)
        self.errors = errors
        """Its stderr."""

    @property
    def last_line(self) -> str:
        """The last line that the command wrote to stderr (where a traceback names the error), else the message."""
        return (self.errors.strip().splitlines() or [str(self)])[-1]


class CommandTimeoutError(CommandError):
    """A command did not end in time."""


@contextlib.contextmanager
def child(
    command: Sequence[str | os.PathLike[str]], *, timeout_s: float, in_session: bool, **settings: Any
) -> Iterator[tuple[subprocess.Popen[Any], threading.Event]]:
    """Start a command and kill it on leaving, or after `timeout_s`; yield it, and an event that is set by the timeout.

    `in_session`: it has a session of its own, which a terminal's Ctrl-C does not reach, and is killed with everything in
    it. `settings` are those of `subprocess.Popen`. Raises `CommandError` if it cannot start.
    """
    process: subprocess.Popen[Any] | None = None
    late = threading.Event()

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            if process is not None:
                os.killpg(process.pid, signal.SIGKILL) if in_session else process.kill()

    def end() -> None:
        late.set()
        kill()

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    try:
        try:
            with _ctrl_c_afterwards():
                process = subprocess.Popen(
                    [os.fspath(word) for word in command], start_new_session=in_session, **settings
                )
        except OSError as error:
            raise CommandError(error.strerror or str(error)) from error
        timer.start()
        yield process, late
    finally:
        timer.cancel()
        if process is not None:
            kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_TIMEOUT_S)


@contextlib.contextmanager
def _ctrl_c_afterwards() -> Iterator[None]:
    """Put off a `KeyboardInterrupt`: in the middle of `Popen` it would leave a command that nobody knows."""
    raising = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(raising):
        yield
        return
    pressed = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, raising)
        if pressed.is_set():
            signal.raise_signal(signal.SIGINT)


def run_command(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    cwd: str | os.PathLike[str] | None = None,
    pass_fds: Sequence[int] = (),
    on_stderr: Progress | None = None,
    in_session: bool = False,
) -> str:
    """Return what the command writes to stdout. Raises `CommandError`.

    It has no input. `on_stderr` is called with each line of stderr, in another thread. The command inherits the
    descriptors `pass_fds`. Without `in_session` (see `child`) Ctrl-C reaches it even where a thread waits for it.
    """
    errors: list[str] = []
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
        child(
            command,
            timeout_s=timeout_s,
            in_session=in_session,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=pass_fds,
        ) as (process, late),
    ):
        assert process.stderr is not None
        reader = threading.Thread(target=_read, args=(process.stderr, errors, on_stderr), daemon=True)
        reader.start()
        status = process.wait()
        if late.is_set():
            raise CommandTimeoutError(f"it did not end within {timeout_s:g} s")
        reader.join(_DRAIN_S)
        if status:
            raise CommandError(f"it ended with status {status}", "".join(errors))
        output.seek(0)
        return output.read()


def _read(stream: IO[str], lines: list[str], on_line: Progress | None) -> None:
    with stream:
        for line in stream:
            lines.append(line)
            if on_line is not None:
                on_line(line)
