"""From the arguments of `gymgate run` to the run they describe. Reads files; starts nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gymgate.api import load_catalog, replay_of
from gymgate.catalog import Catalog, Environment
from gymgate.cli.environments import stack_config
from gymgate.cli.options import EndpointOptions, EnvironmentOptions
from gymgate.cli.output import Log
from gymgate.cli.policies import only_recorded, policy_endpoint, refuse_without_endpoint, replay_files
from gymgate.collection.plan import WHOLE, RolloutPlan, Shard
from gymgate.collection.run import Collection
from gymgate.config import HTTPEndpoint, RayCluster, ReplayEndpoint, RuntimeConfig
from gymgate.dataset import Row, RowSource, open_rows
from gymgate.errors import ConfigError
from gymgate.stack.needs import require_needs

REPLAYING = "policy: recorded answers, replayed (no model is called); -b URL names an endpoint"
_AGENT_ROWS = 10_000
"""Rows of a file that are read for the agents they name."""


def make_collection(
    arguments: Sequence[str],
    *,
    endpoint: EndpointOptions,
    served: EnvironmentOptions,
    gym: RuntimeConfig,
    data: str | None,
    rows: int | None,
    files: Sequence[str],
    log: Log,
    named: Sequence[str] = (),
    repeats: int = 1,
    seeds: Sequence[int] | None = None,
    shard: Shard = WHOLE,
    ray: RayCluster | None = None,
    **fields: Any,
) -> Collection:
    """Check everything that can be checked before something is started, and describe the run.

    `arguments` are `ENV...` or one file of rows, whose environments are `named` or found by the agents its rows name.
    `fields` are further fields of `Collection`. Raises `ConfigError` and `DataError`.
    """
    refuse_without_endpoint(endpoint)
    if endpoint.urls and files:
        raise ConfigError(f"--replay-file needs no endpoint, and -b names one: {endpoint.urls}")
    recordings = replay_files(files)
    policy: HTTPEndpoint | ReplayEndpoint | None = None
    if endpoint.urls:
        policy = policy_endpoint(endpoint, log, ask=ray is None)
    else:
        log(REPLAYING)
    environments, source = _split_arguments(arguments, named, data)
    catalog = load_catalog(gym, progress=log)
    stack = stack_config(environments or _environments_of_rows(source, catalog), served, gym, ray)
    found = [catalog.find(each.name, each.config) for each in stack.environments]
    require_needs(stack, found, replayed=policy is None)
    sources = _sources(source, found, rows)
    if policy is None:
        policy = ReplayEndpoint(rollouts=recordings) if recordings else replay_of(found)
        sources = only_recorded(sources, policy, log)
    return Collection(
        stack=stack,
        policy=policy,
        plan=RolloutPlan(sources, repeats=repeats, seeds=seeds, shard=shard),
        names=[source],
        limits=served.limits,
        wait_for_policy_s=endpoint.wait_for_policy,
        log=log,
        **fields,
    )


def _split_arguments(
    arguments: Sequence[str], named: Sequence[str], data: str | None
) -> tuple[list[str], str]:
    """Environments and data of `ENV... | FILE [--env ENV...]`. Raises `ConfigError` for two sources of rows."""
    files = [each for each in arguments if each.endswith((".jsonl", ".ndjson")) or each.startswith("hf:")]
    environments = [*(each for each in arguments if each not in files), *named]
    if len(files) > 1:
        raise ConfigError(f"one file of rows at a time, not {len(files)}; put their lines into one file")
    if files and data is not None:
        raise ConfigError(f"{files[0]} and --data {data} both name rows; give one of them")
    return environments, files[0] if files else (data or "example")


def _environments_of_rows(data: str, catalog: Catalog) -> list[str]:
    """The environments whose agents a file's rows name. Raises `ConfigError` if they name none, or unknown ones."""
    rows = RowSource(open_rows(data, environment=None), limit=_AGENT_ROWS)
    rows.refuse_empty()
    agents = dict.fromkeys(row.agent or "" for _, row in rows.readable() if isinstance(row, Row))
    if "" in agents:
        raise ConfigError(
            f"rows of {data} name no agent (agent_ref); name the environment: ENV --data {data}"
        )
    found = {agent: _environment_of(agent, catalog) for agent in agents}
    if unknown := [agent for agent, name in found.items() if name is None]:
        raise ConfigError(
            f"{data}: no environment has agent {unknown[0]!r}; name the environment: ENV --data {data}"
        )
    return sorted({name for name in found.values() if name is not None})


def _environment_of(agent: str, catalog: Catalog) -> str | None:
    """The environment whose default config starts the agent. Raises `ConfigError` for several of different names."""
    found: list[Environment] = []
    for environment in catalog.environments():
        try:
            config = environment.config(None)
        except ConfigError:
            continue
        if any(instance.name == agent for instance in config.agents):
            found.append(environment)
    if len(names := sorted({environment.name for environment in found})) > 1:
        raise ConfigError(f"agent {agent!r} is in {', '.join(names)}; name the environment: --env ENV")
    return f"{found[0].kind}/{found[0].name}" if found else None


def _sources(data: str, environments: Sequence[Environment], limit: int | None) -> list[RowSource]:
    """Each environment's packaged data, or one file for all of them."""
    is_file = data.startswith("hf:") or os.sep in data or Path(data).expanduser().is_file()
    if len(environments) > 1 and is_file:
        return [RowSource(open_rows(data, environment=None), None, limit)]
    return [RowSource(open_rows(data, environment=each), each.name, limit) for each in environments]
