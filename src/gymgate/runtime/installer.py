"""uv: found, run with its progress passed on, and its failures condensed to one line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from gymgate.errors import SetupError
from gymgate.runtime.environment import installer_env

Progress = Callable[[str], None]
FailureKind = Literal["network", "disk", "conflict", "other"]

_SIGNS: tuple[tuple[FailureKind, tuple[str, ...]], ...] = (
    ("disk", ("no space left", "os error 28", "disk quota", "os error 122", "file too large", "os error 27")),
    (
        "network",
        (
            "dns error",
            "failed to fetch",
            "failed to download",
            "error sending request",
            "connection refused",
            "network is unreachable",
            "tcp connect",
            "request failed after",
            "network was disabled",
            "network connectivity is disabled",
            "could not resolve host",
        ),
    ),
    ("conflict", ("no solution found", "unsatisfiable")),
)
_STATEMENT = re.compile(r"\s*(error:|cause:|Caused by:|×|[├╰]─▶)\s")
_ASIDE = re.compile(r"(warning|hint): ")
_GIT = re.compile(r"process didn't exit successfully: `[^`]*` \(exit status: \d+\) --- stderr ")
"""Before git's own words."""
_SHOWN = re.compile(r"^\s*(Downloading|Building|Updating) (.+)")


class UvFailedError(Exception):
    """A uv command that failed: what kind of failure, and uv's words on one line, credentials removed."""

    def __init__(self, output: str) -> None:
        self.kind = kind_of(output)
        self.output = output
        """All of it, as it came."""
        self.reason = condense(output, self.kind)
        super().__init__(self.reason)


def find_uv() -> Path:
    """The uv of this environment, else the one on PATH. `SetupError` with the install command if there is none."""
    with contextlib.suppress(ImportError, FileNotFoundError):
        import uv

        return Path(os.fsdecode(uv.find_uv_bin()))
    if found := shutil.which("uv"):
        return Path(found)
    raise SetupError("uv is not installed; it makes NeMo Gym's environment: pip install 'gymgate[nemogym]'")


def run_uv(
    *arguments: str | Path,
    say: Progress | None = None,
    timeout_s: float = 3600,
    held: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Output of a uv command; `say` gets a line for each big download and each build.

    `held` is a descriptor that uv keeps open: a lock that thus outlives us while an orphaned uv still writes.
    Settings of the project in the working directory play no part; the user's and the machine's do. Raises
    `UvFailedError`, and `SetupError` if there is no uv.
    """
    command = [os.fspath(find_uv()), *(os.fspath(argument) for argument in arguments), "--color", "never"]
    with tempfile.TemporaryDirectory(prefix="gymgate-") as nowhere, tempfile.TemporaryFile("w+") as output:
        try:
            process = subprocess.Popen(
                command,
                env={**installer_env(), "UV_NO_PROGRESS": "1", "PWD": nowhere, **(variables or {})},
                cwd=nowhere,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                pass_fds=() if held is None else (held,),
            )
        except OSError as error:
            raise UvFailedError(f"error: {command[0]} does not run: {error.strerror}") from error
        errors = _watched(process, say, timeout_s)
        output.seek(0)
        if process.returncode:
            raise UvFailedError(errors or f"error: uv ended with status {process.returncode}")
        return output.read()


def _watched(process: subprocess.Popen[str], say: Progress | None, timeout_s: float) -> str:
    """What uv says on stderr until it ends; it is ended, too, when we are interrupted."""
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    timer = threading.Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    try:
        assert process.stderr is not None
        text = "".join(_told(process.stderr, say))
        process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        timer.cancel()
        if process.stderr is not None:
            process.stderr.close()
    return f"error: uv did not finish in {timeout_s:g} s" if expired.is_set() else text


def _told(stream: IO[str], say: Progress | None) -> Iterator[str]:
    for line in stream:
        if say is not None and (shown := _SHOWN.match(line)):
            say(f"{shown[1].lower()} {shown[2].strip()}")
        yield line


def kind_of(output: str) -> FailureKind:
    """What kind of failure uv's output tells of."""
    lower = output.lower()
    return next((kind for kind, signs in _SIGNS if any(sign in lower for sign in signs)), "other")


def condense(output: str, kind: FailureKind = "other") -> str:
    """uv's error on one line: for a network or disk failure the innermost cause, else all of it."""
    parts = list(_statements(output))
    if not parts:
        return "uv failed without a message"
    causes = [part for part in parts if part.startswith("cause: ")]
    if kind in ("network", "disk") and causes:
        chosen: Sequence[str] = causes[-1:]
    else:
        chosen = parts
    words = ": ".join(re.sub(r"^(error|cause): ", "", part).rstrip(":") for part in chosen)
    words = re.sub(r"//[^/@\s]+@", "//", _GIT.sub("", words))
    return words if len(words) <= 500 else words[:497] + "..."


def _statements(output: str) -> Iterator[str]:
    """uv's statements of what failed and why, each on one line; progress, warnings and hints left out."""
    current: list[str] = []
    for line in output.splitlines():
        opened = _STATEMENT.match(line)
        words = line.strip(" \t│")
        if opened or not words or _ASIDE.match(words):
            if current:
                yield " ".join(current)
            current = []
        if opened:
            kind = "error: " if opened[1] in ("error:", "×") else "cause: "
            current = [kind + line[opened.end() :].strip()]
        elif current and words:
            current.append(words)
    if current:
        yield " ".join(current)
