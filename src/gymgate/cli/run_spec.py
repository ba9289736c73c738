"""From the command line of `gymgate run`, and a file that it names, to the run they describe. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from gymgate.cli.environments import endpoint_fields, environment_configs, stack_fields, table
from gymgate.cli.options import option_fields
from gymgate.cli.output import Log
from gymgate.cli.texts import parse_judges
from gymgate.core.config import RolloutLimits, RuntimeConfig, StackConfig
from gymgate.core.errors import ConfigError
from gymgate.gym.catalog import Catalog
from gymgate.gym.row_sources import ROWS
from gymgate.gym.runtime import open_catalog
from gymgate.runs.collected.policies import replay_files
from gymgate.runs.collected.prepare import count_rows, environments_of_rows, refuse_missing
from gymgate.runs.described.pace import Pace
from gymgate.runs.described.spec import RunSpec, read_spec


def spec_of(context: click.Context, log: Log) -> RunSpec:
    """Return the run that a command line and its `--spec` describe; options override the file.

    Environments that are not named are found by the agents that the rows of a file name. Raises `ConfigError` and
    `DataError`.
    """
    file, names, data = _named(context)
    if not names and not table(file, "stack").get("environments"):
        names = environments_of_rows(data, catalog_of(context, file, log))
    return overridden(
        context, {**file, "data": data, "policy": _policy(context, table(file, "policy"))}, names
    )


def checked_line(context: click.Context, log: Log, *, files: bool, count: bool) -> int | None:
    """Raise as `refuse_missing` for a command line of `gymgate run` that runs elsewhere, with other variables and endpoints.

    Returns, with `count`, how many rollouts it plans at most; `None` if its rows cannot be counted here: they are elsewhere,
    or come later.
    """
    file, names, data = _named(context)
    environments = environment_configs(context, names or table(file, "stack").get("environments") or ())
    parse_judges(context.params["judges"], ())  # the variables of keys are those of the other machine
    catalog = catalog_of(context, file, log)
    refuse_missing(environments, data or "example", catalog, files=files)
    if not (count and files):
        return None
    fields = {**file, **option_fields(context)[RunSpec]}
    numbers = {name: fields[name] for name in ("rows", "repeats", "seeds") if name in fields}
    spec = RunSpec.model_validate({**numbers, "stack": {"environments": environments or ("of rows",)}})
    rows = 0
    for file_rows in count_rows(environments, data or "example", catalog):
        if (most := spec.rows if file_rows is None else min(file_rows, spec.rows or file_rows)) is None:
            return None
        rows += most
    return rows * spec.repeats * len(spec.seeds or (None,))


def catalog_of(context: click.Context, file: Mapping[str, Any], log: Log) -> Catalog:
    """Open the catalog of the release that a description with options means."""
    runtime = option_fields(context)[StackConfig].get("runtime") or table(file, "stack").get("runtime") or {}
    return open_catalog(RuntimeConfig.model_validate(runtime), progress=log)


def overridden(
    context: click.Context, file: Mapping[str, Any], names: Sequence[str | Mapping[str, Any]]
) -> RunSpec:
    """Return the run that `file` describes, with the environments of these names if there are any, and the options' values.

    Raises `ConfigError`.
    """
    fields = option_fields(context)
    return RunSpec.model_validate(
        {
            **{name: value for name, value in file.items() if value is not None},
            **fields[RunSpec],
            "stack": stack_fields(context, names, table(file, "stack")),
            "pace": table(file, "pace") | fields[Pace],
            "limits": table(file, "limits") | fields[RolloutLimits],
        }
    )


def _named(context: click.Context) -> tuple[dict[str, Any], list[str], str | None]:
    """Return the content of `--spec`, and the environments and the rows of `ENV... | FILE [--env ENV...]`.

    Raises `ConfigError` for two sources of rows.
    """
    values = context.params
    file = read_spec(values["spec"]) if values["spec"] else {}
    data = option_fields(context)[RunSpec].get("data")
    files = [name for name in values["arguments"] if name.endswith(ROWS) or name.startswith("hf:")]
    if len(files) > 1:
        raise ConfigError(f"one file of rows at a time, not {len(files)}; put their lines into one file")
    if files and data is not None:
        raise ConfigError(f"{files[0]} and --data {data} both name rows; give one of them")
    names = [*(name for name in values["arguments"] if name not in files), *values["named"]]
    return file, names, data or (files[0] if files else file.get("data"))


def _policy(context: click.Context, file: dict[str, Any]) -> Mapping[str, Any] | None:
    """Return the settings of the policy: those of the file with the options, or what the options name instead."""
    files, urls = context.params["files"], context.params["urls"]
    if files:
        if urls:
            raise ConfigError(f"--replay-file needs no endpoint, and -b gives one: {urls}")
        file = {"type": "replay", "rollouts": replay_files(files)}
    fields = endpoint_fields(context, file if file.get("type", "http") == "http" else {})
    return fields or file or None
