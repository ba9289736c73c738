"""Commands that are run to their end: what they write, how they fail, and that none of them holds the caller."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time

import pytest

from gymgate.gym.runtime.command import CommandError, CommandTimeoutError, run_command


def run(script: str, timeout_s: float = 20.0, **options: object) -> str:
    command = ["sh", "-c", script]
    return run_command(command, env=dict(os.environ), timeout_s=timeout_s, **options)  # type: ignore[arg-type]


def test_stdout_is_returned_and_each_line_of_stderr_reported() -> None:
    lines: list[str] = []
    assert run("echo out; echo one >&2; echo two >&2", on_stderr=lines.append) == "out\n"
    assert lines == ["one\n", "two\n"]


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(CommandError, match="status 3") as caught:
        run("echo first >&2; echo last >&2; exit 3")
    assert (caught.value.errors, caught.value.last_line) == ("first\nlast\n", "last")
    with pytest.raises(CommandError, match="No such file or directory") as caught:
        run_command(["/no/program"], env={}, timeout_s=1)
    assert caught.value.last_line == "No such file or directory"


def test_a_command_that_hangs_is_killed() -> None:
    started = time.monotonic()
    with pytest.raises(CommandError, match=r"\b0\.2 s"):
        run("exec sleep 60", timeout_s=0.2)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("timeout_s", [0.5, 20.0])
def test_a_session_is_killed_with_what_the_command_started(timeout_s: float) -> None:
    """Whether the command hangs or ends. The pipe ends when no process holds it any more."""
    reading, writing = os.pipe()
    try:
        with pytest.raises(CommandTimeoutError) if timeout_s < 1 else contextlib.nullcontext():
            waits = "wait" if timeout_s < 1 else "true"
            run(f"sleep 60 >/dev/null 2>&1 & {waits}", timeout_s, pass_fds=(writing,), in_session=True)
    finally:
        os.close(writing)
        ended, _, _ = select.select([reading], [], [], 20)
        os.close(reading)
    assert ended


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # its stderr is closed by its collection
def test_ctrl_c_while_a_command_starts_kills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs by then and `Popen` has not returned: nobody else could end it."""
    reading, writing = os.pipe()
    start = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def interrupted(*arguments: object) -> None:
        start(*arguments)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess.Popen, "_execute_child", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            run("exec sleep 60", pass_fds=(writing,), in_session=True)
    finally:
        os.close(writing)
        ended, _, _ = select.select([reading], [], [], 20)
        os.close(reading)
    assert ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_process_left_behind_does_not_hold_the_caller() -> None:
    """It keeps stderr open until this test lets go of the pipe that it reads from."""
    reading, writing = os.pipe()
    try:
        started = time.monotonic()
        assert run(f"cat <&{reading} >/dev/null & echo out", pass_fds=(reading,)) == "out\n"
        assert time.monotonic() - started < 10
    finally:
        os.close(writing)
        os.close(reading)
