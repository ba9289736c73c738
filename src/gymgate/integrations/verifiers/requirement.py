"""Which verifiers this works with, and the names that both sides of the plugin use. Imports nothing heavy."""

from __future__ import annotations

from importlib import metadata

from gymgate.errors import MissingExtraError

INSTALL = "pip install 'gymgate[nemogym]'"
PLUGIN_ID = "nemo-gym-env"
"""What verifiers calls this plugin: the name of the module `nemo_gym_env`."""
DEFAULT_ENVIRONMENT = "example_session_state_mgmt"
DEFAULT_DATA = "example"


def require_verifiers() -> str:
    """The installed verifiers version; `MissingExtraError`, with the install command, below 0.4."""
    try:
        version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise MissingExtraError(f"verifiers is not installed; run: {INSTALL}") from None
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (0, 4):
        raise MissingExtraError(f"verifiers {version} is too old, 0.4 is needed; run: {INSTALL}")
    return version
