"""What a command line of `gymgate run` describes, without running it."""

from __future__ import annotations

from collections.abc import Sequence

from gymgate.cli.environments import environment_configs
from gymgate.cli.run import command
from gymgate.core.config import EnvironmentConfig


def environments_of(names: Sequence[str], *words: str) -> tuple[EnvironmentConfig, ...]:
    """The environments, as the options describe them."""
    with command.make_context("run", [*names, *words]) as context:
        return environment_configs(context, names)


def settings_of(*settings: str) -> list[str]:
    """The words of `--set` for each setting."""
    return [word for setting in settings for word in ("--set", setting)]
