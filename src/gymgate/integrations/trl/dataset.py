"""Rows as datasets for TRL, and the way from a prompt back to its row.

TRL gives a rollout function only the `prompt` column. So the first message of each prompt carries the row's position in
the dataset under `ROW_KEY`; the messages themselves are shown in logs and completion tables.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gymgate.core import codec
from gymgate.core.config import EnvironmentConfig, StackConfig
from gymgate.core.errors import ConfigError, DataError, GymgateError, MissingExtraError
from gymgate.core.extras import install_command
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import open_catalog
from gymgate.integrations.training.sources import WeightedSource, checked_weight, prompt_messages
from gymgate.rollouts import Row

if TYPE_CHECKING:
    from datasets import Dataset

ROW_KEY = "gymgate_row"


def weights_of(environments: str | Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    """Return environment names with their weights, 1 where none is given."""
    if isinstance(environments, Mapping):
        weights = {name: checked_weight(name, weight) for name, weight in environments.items()}
    else:
        weights = dict.fromkeys([environments] if isinstance(environments, str) else environments, 1.0)
    if not weights:
        raise ConfigError("NeMoGymSpec needs at least one environment")
    return weights


def open_environment_rows(
    weights: Mapping[str, float], data: str | Mapping[str, str], config: StackConfig
) -> list[WeightedSource]:
    """Open the rows of each environment. `data` names one source for all of them, or one for each.

    Raises `ConfigError` for an environment that `data` leaves out.
    """
    configured = {environment.name: environment for environment in config.environments}
    configs = [configured.get(name, EnvironmentConfig(name=name)) for name in weights]
    environments = open_catalog(config.runtime, config.component_roots).environments_of(configs)
    sources = []
    for (name, weight), spec, (known_as, environment) in zip(
        weights.items(), configs, environments.items(), strict=True
    ):
        path = data if isinstance(data, str) else data.get(name)
        if path is None:
            raise ConfigError(f"data has no rows for environment {name!r}; it has {', '.join(sorted(data))}")
        rows = open_rows(path, environment=environment)
        agents = None  # overrides may change them
        if name in configured and not spec.overrides:
            agents = frozenset(environment.config(spec.config).row_targets)
        sources.append(WeightedSource(known_as, rows, weight, agents))
    return sources


def make_dataset(rows: Iterable[tuple[str, Row]], name: str) -> Dataset:
    """Make a `datasets.Dataset` of (environment, row) pairs with the columns `prompt`, `row`, `environment`.

    It is written row by row to an Arrow file, read through a memory map, and removed when this process ends. `name`
    distinguishes the datasets of a run. Raises `ConfigError` without rows, and the errors of the rows.
    """
    try:
        from datasets import Dataset, Features, List, Value
    except ImportError as error:
        raise MissingExtraError(f"datasets is not installed: {install_command('datasets')}") from error
    text = Value("string")
    message = {"role": text, "content": text, ROW_KEY: text}
    features = Features({"prompt": List(message), "row": text, "environment": text})
    directory = tempfile.mkdtemp(prefix="gymgate-rows-")
    atexit.register(_remove, directory, os.getpid())
    records = _records(rows, name)
    try:
        return Dataset.from_generator(
            lambda: records, features=features, cache_dir=directory, fingerprint=secrets.token_hex(8)
        )
    except Exception as error:  # datasets wraps the errors of the rows
        if isinstance(error.__cause__, GymgateError):
            raise error.__cause__ from None
        raise


def _remove(directory: str, pid: int) -> None:
    """Remove it, unless this is a forked child that inherited the exit handler."""
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)


def _records(rows: Iterable[tuple[str, Row]], name: str) -> Iterator[dict[str, Any]]:
    position = -1
    for position, (environment, row) in enumerate(rows):
        messages = [{**message, ROW_KEY: None} for message in prompt_messages(row.data)]
        messages[0][ROW_KEY] = f"{name}:{position}"
        yield {"prompt": messages, "row": codec.dumps(row.data).decode(), "environment": environment}
    if position < 0:
        raise ConfigError(f"the {name} dataset is empty: its sources have no rows")


def locate(prompt: Any) -> tuple[str, int]:
    """Return a prompt's dataset and its position there. Raises `DataError` for a prompt not made by `make_dataset`."""
    first = prompt[0] if isinstance(prompt, Sequence) and prompt else None
    key = first.get(ROW_KEY) if isinstance(first, Mapping) else None
    name, _, position = str(key or "").rpartition(":")
    if not position.isdigit():
        raise DataError(
            f"the prompt has no {ROW_KEY!r}: {str(prompt)[:80]!r}; use the dataset of the NeMoGymSpec, unchanged"
        )
    return name, int(position)
