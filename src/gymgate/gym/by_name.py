"""Shortcuts for scripts and trainers: rows and recorded rollouts of an environment by its name, and one row run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import SecretStr

from gymgate.core.config import HTTPEndpoint, ReplayEndpoint, RolloutLimits, RuntimeConfig, StackConfig
from gymgate.core.errors import ConfigError
from gymgate.gym.catalog import Catalog, Environment
from gymgate.gym.rows import open_rows as open_row_source
from gymgate.gym.runtime import open_catalog
from gymgate.rollouts import Rollout, Row, outcome_of
from gymgate.stack import acquire

SHARED_LINGER_S = 120.0
"""Seconds that the stack of `run_row` waits for the next process of a trainer."""


def load_catalog(
    runtime: RuntimeConfig | None = None,
    *,
    roots: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> Catalog:
    """Return the catalog of a nemo-gym release, which is installed when one of its files is needed.

    `roots` are directories with servers of your own; `progress` gets a line per step of the installation.
    """
    return open_catalog(runtime or RuntimeConfig(), roots, progress=progress)


def list_environments(runtime: RuntimeConfig | None = None) -> list[Environment]:
    """Return every environment of a nemo-gym release.

    A supported release need not be installed. Until it is, paths are relative to the directory of its packages.
    """
    return load_catalog(runtime).environments()


def open_rows(
    environment: str, source: str = "example", *, runtime: RuntimeConfig | None = None
) -> Sequence[Row]:
    """Return rows of an environment's packaged data by name, of a JSONL file by path, or of `hf:owner/name[:split]`.

    Raises `ConfigError` for an unknown name and `DataError`, with file and line, for a malformed row.
    """
    return open_row_source(source, environment=load_catalog(runtime).find(environment))


def replay_endpoint(environment: str, *, runtime: RuntimeConfig | None = None) -> ReplayEndpoint:
    """Return a policy that replays the rollouts recorded for an environment; it needs no model and no key.

    Raises `ConfigError` if the environment ships none.
    """
    return replay_of([load_catalog(runtime).find(environment)])


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
        rollouts=tuple(str(file.path) for each in environments for file in each.recordings())
    )


async def run_row(
    row: Mapping[str, Any],
    environment: str | StackConfig,
    *,
    base_url: str,
    api_key: str | None = None,
    limits: RolloutLimits | None = None,
    **settings: Any,
) -> Rollout:
    """Run one row against the model at `base_url` and return its rollout, for trainers that give each rollout a URL and a key.

    An environment by name runs in a stack that all processes of this user share, and that stays up for `SHARED_LINGER_S`
    seconds after its last rollout. Give a `StackConfig` with `share="machine"` to choose more. `settings` are others of
    `HTTPEndpoint`: `model`, `dialect`, `sampling`, `max_retries`. The key goes nowhere but to `base_url`.

    Train on `gymgate.outcome_of(rollout).reward`, which is `None` where no number counts. A failed rollout is raised as the
    error it failed with, so it never becomes a reward of 0. Raises `ConfigError`, `DataError` or `StackStartError` for what
    keeps it from starting.
    """
    if isinstance(environment, str):
        environment = StackConfig(environments=(environment,), share="machine", linger_s=SHARED_LINGER_S)
    policy = HTTPEndpoint(
        base_url=base_url,
        api_key=None if api_key is None else SecretStr(api_key),
        **settings,
    )
    async with acquire(environment) as stack:
        rollout = await stack.run(row, policy=policy, limits=limits, record_bodies=True)
    if outcome_of(rollout).reason == "failed" and rollout.error is not None:
        raise rollout.error.to_exception()
    return rollout
