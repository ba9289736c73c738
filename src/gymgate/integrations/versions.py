"""Whether the SDK of an extra can be used in this interpreter."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Literal

from packaging.version import Version

from gymgate.core.errors import MissingExtraError
from gymgate.core.extras import SDKS, install_command

logger = logging.getLogger(__name__)

NEEDED_TOO = {"inspect": {"openai": "3.4"}}
"""What an extra needs besides its SDK: Inspect's agent bridge needs this openai for any provider."""
EXCLUDED_BY = {"inspect": "openai below 3", "openenv": "mcp 2"}
"""What verifiers needs that an extra excludes."""


def require(extra: Literal["nemogym", "inspect", "openenv"]) -> None:
    """Raise `MissingExtraError`, one line with the install command, unless the packages of an extra are new enough.

    A newer SDK than the tested ones is used, with a warning.
    """
    install = f"run: {install_command(extra)}"
    needed_by = "gymgate"
    if extra in EXCLUDED_BY:
        needed_by = f"gymgate.{extra}"
        install += f", in an environment without verifiers, which needs {EXCLUDED_BY[extra]}"
    sdk = SDKS[extra]
    for name, oldest in {sdk.package: sdk.oldest, **NEEDED_TOO.get(extra, {})}.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            raise MissingExtraError(f"{name} is not installed; {install}") from None
        if Version(installed) < Version(f"{oldest}.dev0"):
            raise MissingExtraError(
                f"{name} {installed} is installed, but {needed_by} needs {oldest} or later; {install}"
            )
    warn_if_untested(extra)


def warn_if_untested(extra: str) -> None:
    """Log one line if the SDK of an extra is newer than the tested releases."""
    sdk = SDKS[extra]
    try:
        untested = sdk.untested(metadata.version(sdk.package))
    except metadata.PackageNotFoundError:
        return
    if untested is not None:
        logger.warning("%s %s", sdk.package, untested)


def failed_import(extra: Literal["skyrl", "verl"], error: ImportError, advice: str) -> MissingExtraError:
    """Return the one-line error for an integration's import that failed: a package is missing, or the SDK has changed.

    Raises an error of gymgate's own modules again.
    """
    module = error.name or ""
    if module.startswith("gymgate"):
        raise error
    sdk, install = SDKS[extra], install_command(extra)
    if module.split(".")[0] != sdk.package or not any(metadata.distributions(name=sdk.package)):
        return MissingExtraError(f"{module or error} is not installed: {install} ({advice})")
    return MissingExtraError(
        f"{sdk.package} {metadata.version(sdk.package)} does not fit: {error};"
        f" gymgate was tested with {sdk.oldest} to {sdk.newest}: {install} ({advice})"
    )
