"""Shortcuts for scripts: the catalog, rows and recorded rollouts of an environment, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from gymgate.catalog import Catalog, Environment
from gymgate.config import ReplayEndpoint, RuntimeConfig
from gymgate.dataset import Row
from gymgate.dataset import open_rows as open_row_source
from gymgate.errors import ConfigError
from gymgate.runtime import ensure_runtime


def load_catalog(
    runtime: RuntimeConfig | None = None,
    *,
    roots: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> Catalog:
    """Return the catalog of a nemo-gym release, which is installed on first use.

    `roots` are directories with servers of your own; `progress` gets a line per step of the installation.
    """
    installed = ensure_runtime(runtime or RuntimeConfig(), progress=progress)
    return Catalog(installed.site, installed.version, [Path(root) for root in roots])


def list_environments(runtime: RuntimeConfig | None = None) -> list[Environment]:
    """Return every environment of a nemo-gym release."""
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
    recordings = load_catalog(runtime).find(environment).recordings()
    if not recordings:
        raise ConfigError(
            f"environment {environment!r} ships no recorded rollouts to replay; name a policy endpoint"
        )
    return ReplayEndpoint(rollouts=tuple(str(file.path) for file in recordings))
