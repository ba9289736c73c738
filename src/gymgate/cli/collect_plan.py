"""What a `gymgate collect` is to do: environments, rows, policy, pace. Reads files; starts nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from gymgate.catalog import Catalog
from gymgate.cli import run_plan
from gymgate.cli.options import EndpointOptions
from gymgate.config import HTTPEndpoint, RuntimeConfig
from gymgate.dataset import open_rows
from gymgate.errors import ConfigError, DataError
from gymgate.serving.slurm_nodes import job_nodes

Say = Callable[[str], None]
_SLURM = re.compile(r"slurm(?:/(\d+))?:(\d+)")
_AGENT_ROWS = 10_000
"""Rows of a file that are looked at for the agents they name."""


def is_row_file(argument: str) -> bool:
    """Whether it names rows and not an environment."""
    return argument.endswith((".jsonl", ".ndjson")) or argument.startswith("hf:")


def split_arguments(
    arguments: Sequence[str], named: Sequence[str], data: str | None
) -> tuple[list[str], str]:
    """Environments and data of `ENV... | FILE [--env ENV...]`. Raises `ConfigError` for two kinds at once."""
    files = [argument for argument in arguments if is_row_file(argument)]
    environments = [*(argument for argument in arguments if argument not in files), *named]
    if len(files) > 1:
        raise ConfigError(f"one file of rows at a time, not {len(files)}; their lines can be put into one")
    if files and data is not None:
        raise ConfigError(f"rows are named twice: {files[0]} and --data {data}")
    return environments, files[0] if files else (data or "example")


def environments_of_rows(data: str, gym: RuntimeConfig, progress: Say) -> list[str]:
    """The environments whose agents a file's rows name. Raises `ConfigError` if they name none, or unknown ones."""
    catalog = open_catalog(gym, progress)
    rows = open_rows(data, environment=None)
    if not len(rows):
        raise DataError(f"{data} has no rows", path=data)
    agents: dict[str, None] = {}
    for position in range(min(len(rows), _AGENT_ROWS)):
        try:
            agents[rows[position].agent or ""] = None
        except DataError as error:
            if error.line is None:
                raise
    if "" in agents:
        raise ConfigError(f"rows of {data} name no agent (agent_ref); name the environment: --env ENV")
    homes = {agent: _home_of(agent, catalog) for agent in agents}
    if unknown := [agent for agent, home in homes.items() if home is None]:
        raise ConfigError(f"{data}: no environment has agent {unknown[0]!r}; name the environment: --env ENV")
    return sorted({home for home in homes.values() if home is not None})


def _home_of(agent: str, catalog: Catalog) -> str | None:
    """The environment whose default config starts the agent."""
    for environment in catalog.environments():
        try:
            config = environment.config(None)
        except ConfigError:
            continue
        if any(instance.name == agent for instance in config.agents):
            return f"{environment.kind}/{environment.name}"
    return None


def open_catalog(gym: RuntimeConfig, progress: Say) -> Catalog:
    """Of a release, which is installed on first use."""
    from gymgate.runtime import ensure_runtime

    runtime = ensure_runtime(gym, progress=progress)
    return Catalog(runtime.site, runtime.version)


def policy_endpoint(given: EndpointOptions, *, say: Say = lambda message: None) -> HTTPEndpoint:
    """Return the endpoint behind `-b URL[,URL...]`; raises `ConfigError` naming the entry that is wrong."""
    assert given.urls is not None
    addresses = endpoint_list(given.urls)
    return run_plan.http_endpoint(
        addresses[0],
        given.model,
        given.dialect,
        given.api_key_var,
        wait_s=given.wait_for_policy,
        say=say,
        replicas=tuple(addresses[1:]),
        sampling=sampling_fields(given.sampling),
        timeout_s=given.call_timeout,
    )


def endpoint_list(text: str) -> list[str]:
    """The URLs in a comma-separated list, where `slurm:PORT` stands for the nodes of this Slurm job and
    `slurm/GROUP:PORT` for those of one group of a heterogeneous one.

    Raises `ConfigError` for an entry that is none, or is there twice.
    """
    addresses = [address for part in text.split(",") for address in _addresses(part.strip().rstrip("/"))]
    for address in addresses:
        if not address.startswith(("http://", "https://")):
            raise ConfigError(
                f"-b {text!r}: {address!r} is not a URL; write http://host:8000/v1[,http://...]"
            )
        if addresses.count(address) > 1:
            raise ConfigError(f"-b {text!r}: {address!r} is there twice")
    return addresses


def _addresses(entry: str) -> list[str]:
    match = _SLURM.fullmatch(entry)
    if match is None:
        return [entry]
    nodes = job_nodes(group=int(match[1]) if match[1] else None)
    return [f"http://{node}:{match[2]}/v1" for node in nodes]


def sampling_fields(texts: Iterable[str]) -> tuple[tuple[str, Any], ...]:
    """`KEY=VALUE` with YAML values, sorted. Raises `ConfigError`."""
    fields: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"--sampling {text!r}: write KEY=VALUE, such as temperature=0.7")
        if key == "seed":
            raise ConfigError(f"--sampling {text!r}: every rollout would be the same; use --seeds")
        try:
            fields[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--sampling {text!r}: the value is not YAML: {error}") from None
        except ValueError as error:
            raise ConfigError(f"--sampling {text!r}: {error}") from None
    return tuple(sorted(fields.items()))


def checked_output(path: Path) -> Path:
    """A directory, or a place for one; `ConfigError` if it is a file."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"-o {path} is a file; a run needs a directory")
    return path
