"""Processes of gymgate's own that run one of its modules: how they are started, and known again by their command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the command that runs a module in this interpreter.

    With `-P`, since `-m` puts the current directory first on the import path, and that may hold a stranger's `json.py`.
    """
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def runs_module(words: Sequence[str], module: str) -> bool:
    """Whether a process with this command line runs a module, started by `module_command`."""
    return [*words[1:4]] == module_command(module)[1:]
