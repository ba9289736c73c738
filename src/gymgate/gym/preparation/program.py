"""Runs `gym.inside.preparation` in a NeMo Gym interpreter and reads its events; the directory that it works in."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gymgate.core.config import cache_dir
from gymgate.core.errors import SetupError
from gymgate.core.files import tail
from gymgate.gym import inside
from gymgate.gym.preparation.order import STAGE
from gymgate.gym.runtime.command import Progress, child
from gymgate.gym.runtime.locks import locked
from gymgate.gym.runtime.venv import LOCK, writing

Event = dict[str, Any]
PROGRAM = Path(inside.__file__).parent / "preparation" / "__main__.py"
LAST_EVENTS = ("done", "help", "lacks", "refused", "failed")
"""Without one of these, the program died."""
END_TIMEOUT_S = 10.0
"""For a program that has closed its output to exit."""
LOG_LINES = 6
"""Lines of the log that an error quotes."""


def run_program(
    python: Path, order: Mapping[str, Any], environment: Mapping[str, str], log: Path, timeout_s: float
) -> Iterator[Event]:
    """Yield the program's events, the last one of `LAST_EVENTS`. Closing the iterator ends the program.

    Raises `SetupError` with the end of its log if it ends without such an event, and if it takes longer than
    `timeout_s`.
    """
    last = ""
    with (
        log.open("wb") as sink,
        child(
            [python, PROGRAM],
            timeout_s=timeout_s,
            in_session=True,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
        ) as (process, late),
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(order).encode())
        with process.stdout as lines:
            for line in lines:
                event: Event = json.loads(line)
                last = event["event"]
                yield event
        if late.is_set():
            limit = f"{timeout_s:g} s and was ended; --prepare-timeout gives it more"
            raise SetupError(f"the preparation took longer than {limit}")
        if last not in LAST_EVENTS:
            status = process.wait(END_TIMEOUT_S)
            last_lines = " | ".join(tail(log, LOG_LINES).splitlines())
            raise SetupError(f"the preparation ended with status {status}: {last_lines}")


@contextlib.contextmanager
def workspace(
    version: str, own: Path | None, release: Path | None, progress: Progress, timeout_s: float
) -> Iterator[Path]:
    """The directory in which a release's preparation works, held by this process.

    Each config of the user's own (`own`) and each release that the user installed (`release`, its packages) has a separate
    one. What was fetched is kept there, so that the next preparation needs no network.

    Waits for another process that holds it. Raises `SetupError` when that takes longer than `timeout_s`, or if the
    file system refuses.
    """
    name = f"nemo-gym-{version}"
    if own is not None or release is not None:
        name += f"-{hashlib.sha256(repr((own, release)).encode()).hexdigest()[:12]}"
    directory = cache_dir() / "data" / name
    with writing(directory.parent):
        pass
    lock = directory.with_name(f".{name}{LOCK}")
    with locked(lock, f"preparing data in {directory}", progress, timeout_s):
        stage = directory / STAGE
        shutil.rmtree(stage, ignore_errors=True)
        with writing(stage):
            pass
        yield directory
