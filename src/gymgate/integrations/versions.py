"""Whether an SDK whose extra cannot be combined with `gymgate[nemogym]` can be used in this interpreter."""

from __future__ import annotations

from importlib import metadata
from typing import Literal

from packaging.version import Version

from gymgate.core.errors import MissingExtraError
from gymgate.core.extras import install_command

NEEDED = {
    "inspect": ({"inspect-ai": "0.3.285", "openai": "3.4"}, "openai below 3"),
    "openenv": ({"openenv": "0.10"}, "mcp 2"),
}
"""Oldest releases of each extra, and what verifiers needs that they exclude. Inspect's agent bridge needs this openai,
whichever provider serves the model."""


def require(extra: Literal["inspect", "openenv"]) -> None:
    """Raise `MissingExtraError`, one line with the install command, unless the packages of an extra are new enough."""
    needed, conflict = NEEDED[extra]
    install = f"run: {install_command(extra)}, in an environment without verifiers, which needs {conflict}"
    for name, oldest in needed.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise MissingExtraError(f"{name} is not installed; {install}") from None
        if Version(found) < Version(oldest):
            raise MissingExtraError(
                f"{name} {found} is installed, but gymgate.{extra} needs {oldest} or later; {install}"
            )
