"""A command run to its end: with a deadline, without input, its failures one error."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence


class CommandError(Exception):
    """A command that did not run, did not end in time, or ended with a status other than 0; the message says which."""

    def __init__(self, reason: str, errors: str = "") -> None:
        super().__init__(reason)
        self.errors = errors
        """What it wrote to stderr."""


def run_command(
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str],
    timeout_s: float,
    cwd: str | os.PathLike[str] | None = None,
) -> str:
    """What it writes to stdout. Raises `CommandError`."""
    try:
        done = subprocess.run(
            [os.fspath(word) for word in command],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise CommandError(f"it ended with status {error.returncode}", error.stderr) from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"it did not end in {timeout_s:g} s") from error
    except OSError as error:
        raise CommandError(error.strerror or str(error)) from error
    return done.stdout
