"""A run before it starts: what its description names is looked up, asked and checked. Starts nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, ReplayEndpoint
from gymgate.core.errors import ConfigError, DataError, OptionError
from gymgate.gym.by_name import replay_of
from gymgate.gym.catalog import Catalog, Environment
from gymgate.gym.open_needs import require_needs
from gymgate.gym.row_sources import ROWS, RowSource, open_rows, open_sources
from gymgate.gym.runtime import open_catalog
from gymgate.rollouts import Row, RowFile
from gymgate.runs.collected.policies import ask_models, only_recorded, recordings_of, with_oracles
from gymgate.runs.collected.progress import RunProgress
from gymgate.runs.collected.run import Collection
from gymgate.runs.described.plan import RolloutPlan, Shard
from gymgate.runs.described.spec import RunSpec
from gymgate.stack.description import stack_settings

Log = Callable[[str], None]
REPLAYING = "policy: recorded answers, replayed (no model is called); -b URL calls a model"
_AGENT_ROWS = 10_000
"""Rows of a file that are read for the agents they name."""


def prepare(spec: RunSpec, *, output: Path | None, shard: Shard, rerun_failed: bool, log: Log) -> Collection:
    """Check everything that can be checked before something is started. Raises `ConfigError` and `DataError`."""
    policy, stack = spec.policy, spec.stack
    recordings = recordings_of(policy) if isinstance(policy, ReplayEndpoint) else []
    if isinstance(policy, ReplayEndpoint) and not recordings:
        raise ConfigError(f"no recorded rollout to replay in {', '.join(policy.rollouts)}")
    stack, endpoint = asyncio.run(ask_models(stack, policy, spec.wait_for_policy_s or 0, log))
    catalog = open_catalog(stack.runtime, stack.component_roots, progress=log)
    environments = catalog.environments_of(stack.environments)
    packaged = [*environments.values()]
    require_needs(stack, packaged, replayed=not isinstance(policy, HTTPEndpoint))
    sources = open_sources(spec.data, environments, spec.rows)
    for environment, config in zip(stack.environments, packaged, strict=True):
        found = config.config(environment.config)
        writer = "the model writes" if isinstance(policy, HTTPEndpoint) else "recorded answers hold"
        is_given = policy is not None and found.runs_code  # else it replays what the release ships
        if what := [writer] * is_given + ["rows hold"] * found.runs_rows:
            written = " and ".join(what)
            log(f"warning: {environment.name} may run code that {written}, with your rights")
    if not isinstance(policy, HTTPEndpoint):
        log(REPLAYING)
        if policy is None:
            endpoint = with_oracles(replay_of(packaged), sources, log)
            recordings = recordings_of(endpoint)
        sources = only_recorded(sources, recordings, log)
    assert endpoint is not None
    return Collection(
        stack=stack,
        policy=endpoint,
        plan=RolloutPlan(sources, repeats=spec.repeats, seeds=spec.seeds, shard=shard),
        names=[spec.data],
        stack_settings=stack_settings(stack, catalog, environments) if stack.server is None else {},
        limits=spec.limits,
        pace=spec.pace,
        record_bodies=spec.record_bodies,
        wait_for_policy_s=spec.wait_for_policy_s,
        output=output,
        rerun_failed=rerun_failed,
        log=log,
        progress=RunProgress(prices=dict(spec.prices)),
    )


def refuse_missing(
    environments: Sequence[EnvironmentConfig], data: str | None, catalog: Catalog, *, files: bool = True
) -> None:
    """Raise `ConfigError` or `DataError` for an environment, config or rows that are not there, before a run is planned.

    Nothing is installed for what the release's scan shows. Without `files`, a file of rows may come later.
    """
    is_path = data is not None and _is_path(data)
    for config in environments:
        environment = _packaged(config, catalog)
        if environment is not None and data is not None and not is_path:
            environment.data_file(data)
    is_file = data is not None and is_path and not data.startswith("hf:")
    if files and data is not None and is_file and not Path(data).expanduser().exists():
        raise DataError(f"{data}: there is no such file", path=data)


def count_rows(environments: Sequence[EnvironmentConfig], data: str, catalog: Catalog) -> list[int | None]:
    """Return how many rows each source of `open_sources` has, for what `refuse_missing` passed.

    `None`: only its files would say it, and they are not here.
    """
    if _is_path(data):
        path = Path(data).expanduser()
        return [len(RowFile(path)) if path.is_file() else None]
    counts: list[int | None] = []
    for config in environments:
        environment = _packaged(config, catalog)
        file = None if environment is None else environment.data_file(data)
        is_here = file is not None and (file.lines is not None or file.path.is_file())
        counts.append(file.rows() if file is not None and is_here else None)
    return counts


def _is_path(data: str) -> bool:
    return data.startswith("hf:") or os.sep in data or Path(data).expanduser().exists() or data.endswith(ROWS)


def _packaged(config: EnvironmentConfig, catalog: Catalog) -> Environment | None:
    """Return a release's environment; `None` for a user's own. Raises `ConfigError` for one that is not there."""
    is_own = "/" in config.name or config.name.endswith((".yaml", ".yml"))
    if is_own and Path(config.name).expanduser().exists():
        return None
    return catalog.look_up(
        config.name, (config.config,) if isinstance(config.config, str) else config.config or ()
    )


def environments_of_rows(data: str | None, catalog: Catalog) -> list[str]:
    """Return the environments of the agents that a file's rows name.

    Raises `ConfigError` if they name none, or unknown ones, and the `DataError` of the first row if no row can be read.
    """
    if data is None:
        raise OptionError("give an environment, a file of rows, or --spec FILE")
    rows = RowSource(open_rows(data, environment=None), limit=_AGENT_ROWS)
    rows.refuse_empty()
    agents: dict[str, None] = {}
    unreadable: DataError | None = None
    for _, row in rows.readable():
        if isinstance(row, Row):
            agents[row.agent or ""] = None
        else:
            unreadable = unreadable or row
    if unreadable is not None and not agents:
        raise unreadable
    if "" in agents:
        raise ConfigError(
            f"rows of {data} name no agent (agent_ref); give the environment: ENV --data {data}"
        )
    return sorted({environment_of(agent, catalog, data, f"ENV --data {data}") for agent in agents})


def environment_of(agent: str, catalog: Catalog, source: str, option: str) -> str:
    """Return the environment whose default config starts the agent, which `source` names.

    Raises `ConfigError` with the option that gives it, if there is none or several of different names.
    """
    environments = []
    for environment in catalog.environments():
        try:
            config = environment.config(None)
        except ConfigError:
            continue
        if agent in config.row_targets:
            environments.append(environment)
    if len(names := sorted({environment.name for environment in environments})) > 1:
        raise ConfigError(f"agent {agent!r} is in {', '.join(names)}; give the environment: --env ENV")
    if not environments:
        raise ConfigError(f"{source}: no environment has agent {agent!r}; give the environment: {option}")
    return environments[0].known_as
