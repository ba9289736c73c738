"""The token server of `examples/token_server`, as a program that tests start and end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def token_server(*arguments: str) -> Iterator[str]:
    """The address of a server of its own; it ends with the block, and with this process if that is killed."""
    command = [
        *(sys.executable, "-m", "examples.token_server"),
        *("--port", "0", "--until-eof", *arguments),
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on "), f"the token server ended with {process.wait(20)}"
            yield line.split()[-1]
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
