"""The knobs as settings of verifiers' eval. Works without importing verifiers, which takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

from packaging.version import Version
from pydantic import ValidationError

from gymgate.errors import ConfigError, MissingExtraError
from gymgate.extras import install_command
from gymgate.integrations.knobs import Knobs, literal, one_line

PLUGIN_ID = "nemo-gym-env"
"""verifiers' name of this plugin: the name of the module `nemo_gym_env`."""
PREFIX = "env.taskset."
"""Prefix of the knobs among an eval's settings."""


def require_verifiers() -> None:
    """Raise `MissingExtraError`, with the install command, unless verifiers 0.4 or later is installed."""
    install = f"run: {install_command('nemogym')}"
    try:
        version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        raise MissingExtraError(f"verifiers is not installed; {install}") from None
    if Version(version).release < (0, 4):
        raise MissingExtraError(
            f"verifiers {version} is installed, but gymgate needs 0.4 or later; {install}"
        )


def knobs_of(settings: Mapping[str, Any]) -> Knobs:
    """Return the knobs among an eval's settings (dotted key -> value); raises `ConfigError` for a wrong value."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        *path, last = name.removeprefix(PREFIX).split(".")
        if not name.startswith(PREFIX) or (path or [last])[0] not in Knobs.model_fields:
            continue
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        is_json = isinstance(value, str) and value.startswith("{")
        inner[last] = None if value == "None" else literal(value) if is_json else value
    try:
        return Knobs.model_validate(nested)
    except ValidationError as error:
        raise ConfigError(f"--{PREFIX}{one_line(error)}") from None
