"""From the command line of `gymgate run`, and a file that it names, to the run they describe. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gymgate.cli.environments import checked_env_vars, environment_configs, parse_judges
from gymgate.cli.options import EndpointOptions, given_fields, is_given, key_variable
from gymgate.cli.output import Log
from gymgate.cli.policies import endpoint_fields, refuse_without_endpoint
from gymgate.core.config import (
    EnvironmentConfig,
    HTTPEndpoint,
    RayCluster,
    ReplayEndpoint,
    RolloutLimits,
    RuntimeConfig,
    StackConfig,
)
from gymgate.core.errors import ConfigError, DataError, OptionError
from gymgate.gym.by_name import replay_of
from gymgate.gym.catalog import Catalog, Environment
from gymgate.gym.open_needs import require_needs
from gymgate.gym.row_sources import RowSource, open_rows, open_sources
from gymgate.gym.runtime import open_catalog
from gymgate.rollouts import Row
from gymgate.runs.pace import Pace, parse_budgets
from gymgate.runs.plan import RolloutPlan, Shard, parse_seeds
from gymgate.runs.policies import (
    ask_judges,
    asked_endpoint,
    only_recorded,
    recordings_of,
    replay_files,
    with_oracles,
)
from gymgate.runs.progress import RunProgress
from gymgate.runs.run import Collection
from gymgate.runs.spec import RunSpec, read_spec
from gymgate.stack.description import stack_settings

REPLAYING = "policy: recorded answers, replayed (no model is called); -b URL calls a model"
ROWS = (".jsonl", ".ndjson")
"""Endings of the names of files with rows."""
_AGENT_ROWS = 10_000
"""Rows of a file that are read for the agents they name."""


def spec_of(context: click.Context, endpoint: EndpointOptions, log: Log) -> RunSpec:
    """Return the run that a command line and its `--spec` describe; options override the file.

    Environments that are not named are found by the agents that the rows of a file name. Raises `ConfigError` and
    `DataError`.
    """
    values, given = context.params, given_fields(context)
    file = read_spec(values["spec"]) if values["spec"] else {}
    names, rows_file = _split_arguments(values["arguments"], values["named"], given[RunSpec].get("data"))
    if rows_file:
        file = {**file, "data": rows_file}
    if not names and not _table(file, "stack").get("environments"):
        data = given[RunSpec].get("data", file.get("data"))
        runtime = RuntimeConfig.model_validate(runtime_of(context, file))
        names = _environments_of_rows(data, open_catalog(runtime, progress=log))
    if values["seeds"] is not None:
        file = {**file, "seeds": parse_seeds(values["seeds"])}
    return overridden(
        context, {**file, "policy": _policy(_table(file, "policy"), endpoint, values["files"])}, names
    )


def runtime_of(context: click.Context, file: Mapping[str, Any]) -> Any:
    """Return the nemo-gym release: that of `--gym` if it is given or the description names none."""
    described = _table(file, "stack").get("runtime")
    return context.params["gym"] if is_given(context, "gym") or not described else described


def overridden(context: click.Context, file: Mapping[str, Any], names: Sequence[Any]) -> RunSpec:
    """Return the run that `file` describes, with the environments of these names if there are any, and the options' values.

    Raises `ConfigError`.
    """
    values, given = context.params, given_fields(context)
    stack, pace = _table(file, "stack"), _table(file, "pace") | given[Pace]
    stack |= {"runtime": runtime_of(context, file), **given[StackConfig]}
    stack["environments"] = _environments(
        names, stack.get("environments") or (), values, given[EnvironmentConfig]
    )
    if judges := parse_judges(values["judges"], values["judge_key_vars"]):
        stack["models"] = _table(stack, "models") | judges
    if cluster := given[RayCluster]:
        if "address" not in cluster:
            raise ConfigError("--cpus-per-stack needs --ray ADDRESS")
        stack["ray"] = RayCluster(**cluster)
    stack["env_vars"] = checked_env_vars(stack.get("env_vars") or ())
    if values["retries"]:
        pace["budgets"] = parse_budgets(values["retries"])
    return RunSpec.model_validate(
        {
            **file,
            **given[RunSpec],
            "stack": stack,
            "pace": pace,
            "limits": _table(file, "limits") | given[RolloutLimits],
        }
    )


def _table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table of a file's, empty if it is not there. Raises `ConfigError` for another value."""
    if not isinstance(value := values.get(name) or {}, Mapping):
        raise ConfigError(f"--spec: {name!r} must be a table of settings, not {value!r}")
    return dict(value)


def _policy(
    before: dict[str, Any], endpoint: EndpointOptions, files: Sequence[str]
) -> Mapping[str, Any] | None:
    """Return the fields of the policy: those of the file with the options, or what the options name instead."""
    if files:
        if endpoint.urls:
            raise ConfigError(f"--replay-file needs no endpoint, and -b gives one: {endpoint.urls}")
        before = {"type": "replay", "rollouts": replay_files(files)}
    http = before if before.get("type", "http") == "http" else {}
    refuse_without_endpoint(endpoint, is_there=bool(http or endpoint.urls))
    if not (http or endpoint.urls):
        return before or None
    fields = endpoint_fields(endpoint)
    if "sampling" in fields:
        fields["sampling"] = _table(http, "sampling") | dict(fields["sampling"])
    return {"api_key_env": key_variable(None), **http, **fields}


def _environments(
    names: Sequence[Any], before: Sequence[Any], values: Mapping[str, Any], given: Mapping[str, Any]
) -> list[EnvironmentConfig]:
    """Return the environments with the options for them: those that are named, else those of the file."""
    names = names or ([before] if isinstance(before, str) else before)
    configs = [
        EnvironmentConfig.model_validate({"name": each} if isinstance(each, str) else each) for each in names
    ]
    options = environment_configs(
        [config.name for config in configs], values["config"], values["agent"], values["settings"]
    )
    return [
        EnvironmentConfig.model_validate(
            {
                **config.model_dump(),
                **given,
                **({"config": option.config} if option.config else {}),
                "overrides": dict(config.overrides) | dict(option.overrides),
            }
        )
        for config, option in zip(configs, options, strict=True)
    ]


def make_collection(
    spec: RunSpec,
    *,
    output: Path | None,
    shard: Shard,
    rerun_failed: bool,
    log: Log,
) -> Collection:
    """Check everything that can be checked before something is started. Raises `ConfigError` and `DataError`."""
    policy, stack = spec.policy, spec.stack
    recordings = recordings_of(policy) if isinstance(policy, ReplayEndpoint) else []
    if isinstance(policy, ReplayEndpoint) and not recordings:
        raise ConfigError(f"no recorded rollout to replay in {', '.join(policy.rollouts)}")
    if isinstance(policy, HTTPEndpoint):
        ask = stack.is_local or policy.model is None
        policy = asked_endpoint(policy, spec.wait_for_policy_s or 0, log) if ask else policy.resolved()
    else:
        log(REPLAYING)
    if stack.is_local:
        judges = ask_judges(dict(stack.models), spec.wait_for_policy_s or 0, log)
        stack = stack.model_copy(update={"models": tuple(sorted(judges.items()))})
    catalog = open_catalog(stack.runtime, stack.component_roots, progress=log)
    environments = catalog.named(stack.environments)
    found = [*environments.values()]
    require_needs(stack, found, replayed=not isinstance(policy, HTTPEndpoint))
    sources = open_sources(spec.data, environments, spec.rows)
    if not isinstance(policy, HTTPEndpoint):
        if policy is None:
            policy = with_oracles(replay_of(found), sources, log)
            recordings = recordings_of(policy)
        sources = only_recorded(sources, recordings, log)
    return Collection(
        stack=stack,
        policy=policy,
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
    for each in environments:
        if ("/" in each.name or each.name.endswith((".yaml", ".yml"))) and Path(
            each.name
        ).expanduser().exists():
            continue
        configs = (each.config,) if isinstance(each.config, str) else each.config or ()
        environment = catalog.look_up(each.name, configs)
        if data is not None and not _is_rows_path(data):
            environment.data_file(data)
    is_file = data is not None and _is_rows_path(data) and not data.startswith("hf:")
    if files and data is not None and is_file and not Path(data).expanduser().exists():
        raise DataError(f"{data}: there is no such file", path=data)


def _is_rows_path(data: str) -> bool:
    return data.startswith("hf:") or os.sep in data or Path(data).expanduser().exists() or data.endswith(ROWS)


def missing_in_line(context: click.Context, log: Log, *, files: bool) -> None:
    """Raise as `refuse_missing` for a command line of `gymgate run` that runs elsewhere, with other variables and endpoints."""
    values = context.params
    file = read_spec(values["spec"]) if values["spec"] else {}
    data = values["data"] if is_given(context, "data") else file.get("data", "example")
    names, rows_file = _split_arguments(values["arguments"], values["named"], None)
    environments = names or _table(file, "stack").get("environments") or ()
    configs = _environments([], environments, values, {})
    catalog = open_catalog(RuntimeConfig.model_validate(runtime_of(context, file)), progress=log)
    refuse_missing(configs, rows_file or data, catalog, files=files)


def _split_arguments(
    arguments: Sequence[str], named: Sequence[str], data: str | None
) -> tuple[list[str], str | None]:
    """Environments and file of rows of `ENV... | FILE [--env ENV...]`. Raises `ConfigError` for two sources of rows."""
    files = [each for each in arguments if each.endswith(ROWS) or each.startswith("hf:")]
    environments = [*(each for each in arguments if each not in files), *named]
    if len(files) > 1:
        raise ConfigError(f"one file of rows at a time, not {len(files)}; put their lines into one file")
    if files and data is not None:
        raise ConfigError(f"{files[0]} and --data {data} both name rows; give one of them")
    return environments, files[0] if files else None


def _environments_of_rows(data: str | None, catalog: Catalog) -> list[str]:
    """The environments whose agents a file's rows name. Raises `ConfigError` if they name none, or unknown ones, and the
    `DataError` of the first row if no row can be read."""
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
    found = {agent: environment_of(agent, catalog) for agent in agents}
    if unknown := [agent for agent, name in found.items() if name is None]:
        raise ConfigError(
            f"{data}: no environment has agent {unknown[0]!r}; give the environment: ENV --data {data}"
        )
    return sorted({name for name in found.values() if name is not None})


def environment_of(agent: str, catalog: Catalog) -> str | None:
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
        raise ConfigError(f"agent {agent!r} is in {', '.join(names)}; give the environment: --env ENV")
    return f"{found[0].kind}/{found[0].name}" if found else None
