"""Run uv, pass on its progress, and put its failures on one line."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from gymgate.core.errors import SetupError
from gymgate.gym.runtime.command import CommandError, Progress, run_command
from gymgate.gym.runtime.variables import installer_env

FailureKind = Literal["network", "disk", "conflict", "other"]

_PHRASES: dict[FailureKind, tuple[str, ...]] = {
    "disk": ("no space left", "os error 28", "disk quota", "os error 122", "file too large", "os error 27"),
    "network": (
        *("dns error", "failed to fetch", "failed to download", "error sending request", "tcp connect"),
        *("connection refused", "network is unreachable", "could not resolve host", "request failed after"),
        *("network was disabled", "network connectivity is disabled"),
    ),
    "conflict": ("no solution found", "unsatisfiable"),
}
"""Messages of uv and git, in lower case, for each kind of failure."""
_STATEMENT = re.compile(r"\s*(error:|cause:|Caused by:|×|[├╰]─▶)\s")
_ASIDE = re.compile(r"(warning|hint): ")
_GIT = re.compile(r"process didn't exit successfully: `[^`]*` \(exit status: \d+\) --- stderr ")
"""uv's words before the message of a git command that failed."""
_PROGRESS = re.compile(r"^\s*(Downloading|Building|Updating) (.+)")
_LONGEST_MESSAGE = 500


class UvFailedError(Exception):
    """A uv command failed. The message is uv's own, on one line and without credentials."""

    def __init__(self, output: str) -> None:
        self.kind = kind_of(output)
        self.output = output
        """Everything that uv wrote to stderr."""
        super().__init__(condense(output, self.kind))


def find_uv() -> Path:
    """Return the uv of this environment, else the one on PATH. Raises `SetupError` if there is none."""
    with contextlib.suppress(ImportError, FileNotFoundError):
        import uv

        return Path(os.fsdecode(uv.find_uv_bin()))
    if command := shutil.which("uv"):
        return Path(command)
    raise SetupError("uv is not installed; gymgate needs it to install NeMo Gym: pip install uv")


def run_uv(
    *arguments: str | Path,
    progress: Progress | None = None,
    timeout_s: float = 3600,
    lock: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Return the output of a uv command; `progress` gets a line for each large download and each build.

    uv inherits the lock descriptor `lock`, so that an orphaned uv that still writes keeps the lock. uv runs in `/`: it reads
    the user's and the machine's settings, not those of a project in the working directory, nor a `/tmp/uv.toml` of another
    user, as it would below `/tmp`. Raises `UvFailedError`, and `SetupError` if uv is not installed.
    """

    def report(line: str) -> None:
        if progress is not None and (match := _PROGRESS.match(line)):
            progress(f"{match[1].lower()} {match[2].strip()}")

    uv = find_uv()
    try:
        return run_command(
            [uv, *arguments, "--color", "never"],
            env={**installer_env(), "UV_NO_PROGRESS": "1", "PWD": "/", **(variables or {})},
            timeout_s=timeout_s,
            cwd="/",
            pass_fds=() if lock is None else (lock,),
            on_stderr=report,
        )
    except CommandError as error:
        raise UvFailedError(error.errors or f"error: {uv} failed: {error}") from error


def kind_of(output: str) -> FailureKind:
    """Return the kind of failure that uv's output tells of."""
    lower = output.lower()
    return next(
        (kind for kind, phrases in _PHRASES.items() if any(phrase in lower for phrase in phrases)), "other"
    )


def condense(output: str, kind: FailureKind = "other") -> str:
    """Return uv's error on one line: the innermost cause of a network or disk failure, else all of it."""
    statements = list(_statements(output))
    causes = [text for is_cause, text in statements if is_cause]
    chosen = causes[-1:] if kind in ("network", "disk") else []
    message = ": ".join(text.rstrip(":") for text in chosen or [text for _, text in statements])
    message = re.sub(r"//[^/@\s]+@", "//", _GIT.sub("", message)) or "uv failed without a message"
    return message if len(message) <= _LONGEST_MESSAGE else message[: _LONGEST_MESSAGE - 3] + "..."


def _statements(output: str) -> Iterator[tuple[bool, str]]:
    """Each error (`False`) and cause (`True`) in uv's output, on one line; progress, warnings and hints left out."""
    is_cause, words = False, ""
    for line in [*output.splitlines(), ""]:
        opening = _STATEMENT.match(line)
        text = line.strip(" \t│")
        if opening or not text or _ASIDE.match(text):
            if words:
                yield is_cause, words
            words = ""
        if opening:
            is_cause, words = opening[1] not in ("error:", "×"), line[opening.end() :].strip()
        elif words and text and not _ASIDE.match(text):
            words += f" {text}"
