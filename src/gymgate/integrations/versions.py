"""Whether the SDK of an extra can be used in this interpreter."""

from __future__ import annotations

from importlib import metadata
from typing import Literal

from packaging.version import Version

from gymgate.core.errors import MissingExtraError
from gymgate.core.extras import install_command

OLDEST = {
    "nemogym": {"verifiers": "0.4"},
    "inspect": {
        "inspect-ai": "0.3.285",
        "openai": "3.4",
    },  # its agent bridge needs this openai for any provider
    "openenv": {"openenv": "0.10"},
}
EXCLUDED_BY = {"inspect": "openai below 3", "openenv": "mcp 2"}
"""What verifiers needs that an extra excludes."""


def require(extra: Literal["nemogym", "inspect", "openenv"]) -> None:
    """Raise `MissingExtraError`, one line with the install command, unless the packages of an extra are new enough."""
    install = f"run: {install_command(extra)}"
    needed_by = "gymgate"
    if extra in EXCLUDED_BY:
        needed_by = f"gymgate.{extra}"
        install += f", in an environment without verifiers, which needs {EXCLUDED_BY[extra]}"
    for name, oldest in OLDEST[extra].items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise MissingExtraError(f"{name} is not installed; {install}") from None
        if Version(found) < Version(f"{oldest}.dev0"):
            raise MissingExtraError(
                f"{name} {found} is installed, but {needed_by} needs {oldest} or later; {install}"
            )
