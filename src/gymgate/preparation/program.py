"""Runs `in_gym` in a NeMo Gym interpreter and reads what it tells."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gymgate.errors import SetupError

Event = dict[str, Any]
PROGRAM = Path(__file__).parent / "in_gym" / "__main__.py"
KILL_TIMEOUT_S = 10.0
TAIL = 2000
"""Characters of the log that an error quotes."""


def run_program(
    python: Path, order: Mapping[str, Any], environment: Mapping[str, str], log: Path, timeout_s: float
) -> Iterator[Event]:
    """Events in their order, the last one `done`, `help`, `refused` or `failed`; closing the iterator ends the program.

    Raises `SetupError` with the end of its log if it ends without such an event, and if it takes longer than
    `timeout_s`.
    """
    read, write = os.pipe()
    with os.fdopen(read, "rb") as events, log.open("wb") as sink:
        try:
            process = subprocess.Popen(
                [str(python), str(PROGRAM), str(write)],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                pass_fds=[write],
                start_new_session=True,
            )
        finally:
            os.close(write)
        late = threading.Event()
        timer = threading.Timer(timeout_s, _end_late, (process, late))
        timer.daemon = True
        timer.start()
        try:
            yield from _events(process, order, events, log, late, timeout_s)
        finally:
            timer.cancel()
            _end(process)


def _events(
    process: subprocess.Popen[bytes],
    order: Mapping[str, Any],
    events: Any,
    log: Path,
    late: threading.Event,
    timeout_s: float,
) -> Iterator[Event]:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(json.dumps(order).encode())
    ended = False
    for line in events:
        event: Event = json.loads(line)
        ended = event["event"] in ("done", "help", "refused", "failed")
        yield event
    if late.is_set():
        raise SetupError(
            f"the preparation took longer than {timeout_s:g} s and was ended; --timeout gives it more"
        )
    if not ended:
        status = process.wait(KILL_TIMEOUT_S)
        raise SetupError(f"the preparation ended with status {status}: {log_tail(log)}")


def log_tail(log: Path) -> str:
    """The last lines of a log, on one line."""
    with contextlib.suppress(OSError):
        return " | ".join(log.read_text(errors="replace")[-TAIL:].split("\n")[-6:]).strip(" |")
    return ""


def _end_late(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    _kill(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Whatever it started in its session goes with it."""
    _kill(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_TIMEOUT_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
