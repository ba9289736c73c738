"""Command-line agents from npm: each in a directory of its own under the cache, made once.

NeMo Gym would install them by itself when the agent starts: globally, in every process at once, and without npm by
downloading Node.js; and it would use whatever version is on `PATH`.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymgate.config import cache_dir
from gymgate.errors import NeedMissingError
from gymgate.runtime.command import CommandError, run_command
from gymgate.runtime.environment import clean_env
from gymgate.runtime.held import hold
from gymgate.runtime.installer import Progress
from gymgate.runtime.npm_packages import install_package
from gymgate.runtime.venv import MARKER, UNFINISHED, locked, writing

_VERSION_TIMEOUT_S = 20.0
_LATEST = "latest"


@dataclass(frozen=True)
class Program:
    """A command that an agent runs, and the npm package that has it."""

    command: str
    package: str
    version_key: str
    """Setting of the agent that says which version; unset: the latest."""

    def version(self, settings: Mapping[str, Any]) -> str:
        return str(settings.get(self.version_key) or _LATEST)


PROGRAMS: Mapping[str, Program] = {
    "claude_code_agent": Program("claude", "@anthropic-ai/claude-code", "claude_code_version"),
    "cline_agent": Program("cline", "cline", "cline_version"),
    "codex_agent": Program("codex", "@openai/codex", "codex_version"),
    "kilocode_agent": Program("kilo", "@kilocode/cli", "kilo_version"),
    "openclaw_agent": Program("openclaw", "openclaw", "openclaw_version"),
    "opencode_agent": Program("opencode", "opencode-ai", "opencode_version"),
    "pi_agent": Program("pi", "@earendil-works/pi-coding-agent", "pi_version"),
}
"""By the agent's implementation."""


def ensure_program(agent_type: str, settings: Mapping[str, Any], progress: Progress) -> Path | None:
    """The agent's command, installed if need be; `None` if it needs none, or has it on `PATH` in the version that its
    config names, or without npm in any version. Blocks.

    Raises `NeedMissingError` without npm, `SetupError` if npm fails.
    """
    program = PROGRAMS.get(agent_type)
    if program is None:
        return None
    version = program.version(settings)
    found = shutil.which(program.command)
    if found and (version == _LATEST or _is_version(found, version)):
        return None
    root = cache_dir() / "npm"
    place = root / re.sub(r"[^A-Za-z0-9._-]+", "_", f"{program.package}-{version}").strip("_")
    command = place / "bin" / program.command
    if command.exists() and hold(place / MARKER):
        return command
    npm = shutil.which("npm")
    if npm is None and found:
        progress(f"warning: {found} is not {program.command} {version}; it is used, since there is no npm")
        return None
    if npm is None:
        raise NeedMissingError(
            f"{agent_type} runs the command {program.command!r}, which is not on PATH, and there is no npm to install "
            f"{program.package} with; put the command on PATH, or install Node.js with npm",
            need=f"{program.command} (npm: {program.package})",
        )
    with writing(root), locked(root, f"installing {place.name}", progress):
        if not (command.exists() and (place / MARKER).exists()):
            progress(f"installing {program.package} {version} with npm")
            _install(npm, program, version, place)
        hold(place / MARKER)
    return command


def _is_version(command: str, version: str) -> bool:
    try:
        told = run_command([command, "--version"], env=clean_env(), timeout_s=_VERSION_TIMEOUT_S)
    except CommandError:
        return False
    return version in told.split()


def _install(npm: str, program: Program, version: str, place: Path) -> None:
    """Install a command at `place`, all of it or nothing."""
    with tempfile.TemporaryDirectory(prefix=f"{place.name}{UNFINISHED}", dir=place.parent) as unfinished:
        prefix = Path(unfinished) / "made"
        install_package(npm, program.package, version, program.command, prefix, place)
        about = {"package": f"{program.package}@{version}", "command": program.command}
        (prefix / MARKER).write_text(json.dumps(about), encoding="utf-8")
        if place.exists():  # incomplete, from elsewhere
            shutil.rmtree(place)
        prefix.rename(place)
