"""From command-line options to the endpoint of the policy and the stack: its environments, judges, variables. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from gymgate.cli.options import Option, is_on_line, option_fields
from gymgate.cli.texts import endpoint_list, key_variable, parse_judges, parse_overrides
from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, RayCluster, StackConfig
from gymgate.core.errors import ConfigError, DataError


def stack_fields(
    context: click.Context,
    names: Sequence[str | Mapping[str, Any]],
    file: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the settings of the stack that the options describe: those of `file`, overridden.

    `names` are its environments; without one they are the file's. Raises `ConfigError`.
    """
    values, fields = context.params, option_fields(context)
    stack = {**file, **fields[StackConfig]}
    if fields[StackConfig].get("linger_s"):
        stack.setdefault("share", "machine")
    stack["environments"] = environment_configs(context, names or file.get("environments") or ())
    if judges := parse_judges(values.get("judges", ()), values.get("judge_key_vars", ())):
        stack["models"] = table(file, "models") | judges
    if cluster := fields[RayCluster]:
        if "address" not in cluster:
            raise ConfigError("--cpus-per-stack needs --ray ADDRESS")
        stack["ray"] = RayCluster(**cluster)
    variables = stack.get("env_vars") or ()
    if missing := [name for name in variables if name not in os.environ]:
        raise ConfigError(f"environment variable {missing[0]!r} is not set (--env-var)")
    return {**stack, "env_vars": tuple(sorted({*variables}))}


def environment_configs(
    context: click.Context, environments: str | Sequence[str | Mapping[str, Any]]
) -> tuple[EnvironmentConfig, ...]:
    """Return environments, by name or as a file describes them, with the options for them.

    Raises `ConfigError` for `--config` or `--agent` with several environments.
    """
    fields = option_fields(context)[EnvironmentConfig]
    items = [environments] if isinstance(environments, str) else environments
    configs = [
        EnvironmentConfig.model_validate({"name": item} if isinstance(item, str) else item) for item in items
    ]
    if len(configs) > 1 and (wrong := [f"--{name}" for name in ("config", "agent") if name in fields]):
        raise ConfigError(
            f"{' and '.join(wrong)} can be given for one environment only, not for {len(configs)}"
        )
    overrides = parse_overrides(context.params.get("settings", ()), [config.name for config in configs])
    return tuple(
        EnvironmentConfig.model_validate(
            {
                **config.model_dump(),
                **fields,
                "overrides": dict(config.overrides) | overrides[config.name],
            }
        )
        for config in configs
    )


def endpoint_fields(context: click.Context, file: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the settings of the policy's endpoint: those of `file`, overridden by the options.

    Empty if neither gives an address. Raises `ConfigError` for other options of an endpoint then.
    """
    fields = option_fields(context)[HTTPEndpoint]
    if (urls := context.params["urls"]) is not None:
        first, *replicas = endpoint_list(urls)
        fields |= {"base_url": first, "replicas": tuple(replicas)}
    elif not file:
        options = [
            option.opts[0]
            for option in context.command.params
            if isinstance(option, Option) and option.group == "Policy" and is_on_line(context, option.name)
        ]
        if names := [name for name in options if name != "--replay-file"]:
            raise ConfigError(f"{' and '.join(names)} needs an endpoint; give one: -b http://host:8000/v1")
        return {}
    if "sampling" in fields:
        fields["sampling"] = table(file, "sampling") | fields["sampling"]
    return {"api_key_env": key_variable(None), **file, **fields}


def table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table of a file's, empty if it is not there. Raises `ConfigError` for another value."""
    if not isinstance(value := values.get(name) or {}, Mapping):
        raise ConfigError(f"--spec: {name!r} must be a table of settings, not {value!r}")
    return dict(value)


def writable_path(path: Path) -> Path:
    """Return a path at which a file or a directory can be made. Raises `DataError` otherwise."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise DataError(f"cannot write {path}: {parent} is not a directory", path=str(path))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DataError(f"cannot write {path}: {parent} is not writable", path=str(path))
    return path
