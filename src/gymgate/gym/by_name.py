"""Shortcuts for scripts and trainers: rows and recorded rollouts of an environment by its name."""

from __future__ import annotations

from collections.abc import Sequence

from gymgate.core.config import ReplayEndpoint, RuntimeConfig
from gymgate.core.errors import ConfigError
from gymgate.gym.catalog import Environment
from gymgate.gym.row_sources import open_rows as open_row_source
from gymgate.gym.runtime import open_catalog
from gymgate.rollouts import Row


def list_environments(runtime: RuntimeConfig | None = None) -> list[Environment]:
    """Return every environment of a nemo-gym release.

    A supported release need not be installed. Until it is, paths are relative to the directory of its packages.
    """
    return open_catalog(runtime).environments()


def open_rows(
    environment: str, source: str = "example", *, runtime: RuntimeConfig | None = None
) -> Sequence[Row]:
    """Return rows of an environment's packaged data by name, of a JSONL file by path, or of `hf:owner/name[:split]`.

    Raises `ConfigError` for an unknown name and `DataError`, with file and line, for a malformed row.
    """
    return open_row_source(source, environment=open_catalog(runtime).find(environment))


def replay_endpoint(environment: str, *, runtime: RuntimeConfig | None = None) -> ReplayEndpoint:
    """Return a policy that replays the rollouts recorded for an environment; it needs no model and no key.

    Raises `ConfigError` if the environment ships none.
    """
    return replay_of([open_catalog(runtime).find(environment)])


def replay_of(environments: Sequence[Environment]) -> ReplayEndpoint:
    """Return a policy that replays the rollouts recorded for some environments.

    Raises `ConfigError` for an environment that ships none.
    """
    for environment in environments:
        if not environment.recordings():
            raise ConfigError(
                f"environment {environment.name!r} ships no recorded rollouts to replay; give a policy endpoint: "
                "-b http://host:8000/v1, or recordings: --replay-file FILE"
            )
    return ReplayEndpoint(
        rollouts=tuple(str(file.path) for environment in environments for file in environment.recordings())
    )
