"""Whether Inspect AI can be used in this interpreter."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

from gymgate.errors import MissingExtraError

NEEDED = {"inspect-ai": "0.3.285", "openai": "3.4"}
"""Oldest releases. Inspect's agent bridge needs this openai, whichever provider serves the model."""
_INSTALL = (
    "run: pip install 'gymgate[inspect]', in an environment without verifiers, which needs openai below 3"
)


def require_inspect() -> None:
    """Raise `MissingExtraError`, one line with the install command, unless Inspect AI and openai are new enough."""
    for name, oldest in NEEDED.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise MissingExtraError(f"{name} is not installed; {_INSTALL}") from None
        if Version(found) < Version(oldest):
            raise MissingExtraError(
                f"{name} {found} is installed, but gymgate.inspect needs {oldest} or later; {_INSTALL}"
            )
