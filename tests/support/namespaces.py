"""Programs in another PID namespace of this machine, with the same files and the same Docker daemon."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]


def elsewhere(program: str) -> str:
    """Run a Python program in a PID namespace of its own; returns what it prints. Skips the test where that is not allowed."""
    return subprocess.run(_command(program), check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout


@contextmanager
def lives_elsewhere(program: str) -> Iterator[str]:
    """The line that a program prints, in a namespace that lasts as long as the context.

    The kernel soon gives the number of a namespace that has ended to a new one.
    """
    command = _command(f"{program}\nimport sys; sys.stdout.flush(); sys.stdin.read()")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline()
        finally:
            process.kill()


@functools.cache
def _refusal() -> str:
    try:
        subprocess.run([*_UNSHARE, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as error:
        return str(getattr(error, "stderr", None) or error)
    return ""


def _command(program: str) -> list[str]:
    if reason := _refusal():
        pytest.skip(f"unshare --pid is not allowed here: {reason}")
    return [*_UNSHARE, sys.executable, "-c", program]
