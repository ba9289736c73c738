"""uv: found, run, and its failures condensed to one line."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gymgate.errors import SetupError
from gymgate.runtime.environment import installer_env

NETWORK = (
    "dns error",
    "failed to fetch",
    "connection refused",
    "network is unreachable",
    "tcp connect",
    "request failed",
)
FULL = ("no space left", "os error 28", "disk quota")


def find_uv() -> str:
    """The uv of this environment, else the one on PATH. `SetupError` with the install command if there is none."""
    try:
        import uv

        return os.fsdecode(uv.find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if not found:
        raise SetupError(
            "uv is not installed; it makes NeMo Gym's environment: pip install 'gymgate[nemogym]'"
        )
    return found


def run_uv(*arguments: str | Path, what: str, cwd: Path | None = None, timeout_s: float = 1800) -> str:
    """Output of a uv command. Raises `SetupError` that says what could not be done and why, in one line."""
    command = [find_uv(), *(os.fspath(argument) for argument in arguments), "--no-config", "--color", "never"]
    try:
        done = subprocess.run(
            command,
            env={**installer_env(), "UV_NO_PROGRESS": "1"},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"{what}: uv did not finish in {timeout_s:g} s") from error
    except OSError as error:
        raise SetupError(f"{what}: {os.strerror(error.errno or errno.EIO)}: {command[0]}") from error
    if done.returncode:
        raise SetupError(f"{what}: {condense(done.stderr)}")
    return done.stdout


def condense(output: str) -> str:
    """uv's error as one line, with the usual causes named first."""
    lines = [line.strip(" ├╰─▶│×").strip() for line in output.splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(("warning:", "hint:")))[:600]
    lower = output.lower()
    if any(sign in lower for sign in FULL):
        return f"no space left on the disk ({text[-200:]})"
    if any(sign in lower for sign in NETWORK):
        return f"the package index cannot be reached ({text[:300]})"
    return text or "uv failed without a message"


def conflict_of(error: SetupError) -> bool:
    """Whether uv found no set of versions that satisfies all requirements."""
    return "No solution found" in str(error) or "unsatisfiable" in str(error)


def versions(requirements: Sequence[str]) -> str:
    return ", ".join(requirements[:4]) + (", ..." if len(requirements) > 4 else "")
