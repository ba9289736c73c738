"""Run a command to its end, with a deadline and without input."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO

Progress = Callable[[str], None]
"""Called with each line of progress; one that starts with `warning: ` is a warning."""

_DRAIN_S = 1.0
"""How long to read on after the command has ended: a process that it started may keep stderr open."""


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


def run_command(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    cwd: str | os.PathLike[str] | None = None,
    pass_fds: Sequence[int] = (),
    on_stderr: Progress | None = None,
) -> str:
    """Return what the command writes to stdout. Raises `CommandError`.

    `on_stderr` is called with each line of stderr, in another thread. The command inherits the descriptors `pass_fds`.
    """
    errors: list[str] = []
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            process = subprocess.Popen(
                [os.fspath(word) for word in command],
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=pass_fds,
            )
        except OSError as error:
            raise CommandError(error.strerror or str(error)) from error
        assert process.stderr is not None
        reader = threading.Thread(target=_read, args=(process.stderr, errors, on_stderr), daemon=True)
        reader.start()
        try:
            status = process.wait(timeout_s)
        except BaseException as error:
            process.kill()
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise CommandError(f"it did not end within {timeout_s:g} s") from error
            raise
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
