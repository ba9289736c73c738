"""`gymgate info`: one environment in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymgate.cli.options import gym_option, json_option
from gymgate.cli.output import echo, log, print_json, print_table
from gymgate.core import codec
from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import ConfigError, DataError
from gymgate.core.json_server import shortened
from gymgate.gym.catalog import DataFile, EnvConfig, Environment
from gymgate.gym.catalog.description import (
    ConfigDescription,
    describe_config,
    describe_sandbox,
    unshipped_datasets,
)
from gymgate.gym.catalog.entries import REGISTRY_ONLY
from gymgate.gym.inside.resolve import ServerInstance
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import open_catalog
from gymgate.rollouts.row_fields import flat_row
from gymgate.rollouts.transcript import cut, transcript

if TYPE_CHECKING:
    from gymgate.quality import CheckResult

IMAGES_SHOWN = 3
TOOLS_SHOWN = 8
LONGEST_FIELD = 100
"""Characters of a row's field that are shown."""
_NOT_THE_ENVIRONMENTS = ("responses_create_params", "agent_ref")
"""Fields that every row has."""
LONGEST_PROMPT = 600
"""Characters of a message that are shown."""


@dataclass(frozen=True)
class EnvironmentDescription:
    """What `gymgate info --json` prints."""

    name: str
    kind: str
    path: Path
    domain: str | None
    description: str | None
    verified: bool | None
    """NeMo Gym's own word; `None`: it does not say."""
    needs_data: bool
    """Whether the release has no rows of it that can be run."""
    default_config: str
    configs: Sequence[ConfigDescription]
    data: Sequence[DataFile]
    recordings: Sequence[str]
    row_images: Sequence[str]
    """Images that its packaged rows name."""
    tools: Sequence[str]
    """Names of the tools that its packaged rows offer to the policy."""
    reward: str | None
    """What its reward is, and the place in the release's files that says so; `None`: it is not known."""
    record: CheckResult | None
    """What was measured before, and ships with gymgate."""


@click.command()
@click.argument("environment", metavar="ENV")
@click.option(
    "--config",
    "config_names",
    multiple=True,
    metavar="NAME",
    help="Describe this config, not the default one. Repeatable: combined in order.",
)
@gym_option
@json_option
def command(environment: str, config_names: tuple[str, ...], gym: RuntimeConfig, as_json: bool) -> None:
    """Show one environment: configs, agents, data, needs, quality.

    The needs are estimated from its files; nothing is run. The record was measured before and ships with gymgate.
    """
    catalog = open_catalog(gym, progress=log)
    entry = catalog.look_up(environment, config_names)
    config = entry.config(config_names or None)
    from gymgate.quality.record.storage import shipped_record

    record = shipped_record(entry.kind, entry.name, catalog.version)
    if as_json:
        print_json(description(entry, record))
        return
    _head(entry, catalog.version)
    _configs(entry, config)
    _environment_servers(entry)
    _data(entry, config)
    _sandboxes(entry, config)
    _tools(entry)
    _needs(entry, config)
    _first_prompt(entry)
    if record is not None:
        _record(record)


def description(environment: Environment, record: CheckResult | None) -> EnvironmentDescription:
    """Return an environment as `--json` shows it, with the lines of its data counted."""
    return EnvironmentDescription(
        name=environment.name,
        kind=environment.kind,
        path=environment.path,
        domain=environment.domain,
        description=environment.description,
        verified=environment.verified,
        needs_data=environment.needs_data,
        default_config=environment.config().name,
        configs=[describe_config(config) for config in environment.configs],
        data=[replace(file, lines=file.rows()) for file in environment.data],
        recordings=[file.name for file in environment.recordings()],
        row_images=environment.images or (),
        tools=environment.tools or (),
        reward=environment.reward,
        record=record,
    )


def _record(record: CheckResult) -> None:
    """The shipped record in short."""
    from gymgate.quality.record.findings import findings, right_answer

    echo()
    cost, shape = record.cost, record.shape
    machine = f" ({record.machine})" if record.measured else ""
    echo(f"checked {record.date} with nemo-gym {record.nemo_gym}{machine}:")
    compared = f", {record.matched} of {record.compared} recorded rewards" if record.compared else ""
    echo(f"  verdict: {record.verdict}{compared}{f' ({record.detail})' if record.detail else ''}")
    if record.deterministic is not None:
        count, changed = record.deterministic.rollouts, len(record.deterministic.changed)
        echo(f"  scored again: {count - changed} of {count} rewards stayed the same")
    if cost is not None:
        figures = (
            (cost.verification_ms, "ms to verify"),
            (cost.rest_mb, "MB"),
            (cost.rollouts_per_core_s, "rollouts/s scored by one core"),
            (cost.ready_s, "s to start"),
        )
        echo(f"  cost: {', '.join(f'{value:g} {unit}' for value, unit in figures if value is not None)}")
        if cost.most_rollouts_s is not None:
            echo(
                f"  capacity: {cost.most_rollouts_s:g} rollouts/s, limited by {cost.limited_by}, so with a policy that takes "
                f"60 s a rollout {cost.most_rollouts_s * 60:,.0f} at once; each adds {cost.rollout_mb:g} MB and "
                f"{cost.rollout_files:g} open files"
            )
    if shape is not None and shape.turns is not None:
        rewards = ", ".join(f"{value} ({count} times)" for value, count in shape.rewards.items())
        echo(
            f"  recorded: {shape.recordings} rollouts with {shape.turns:g} turns on average, rewards {rewards}"
        )
    if answer := right_answer(record):
        echo(f"  right answer: {answer}")
    if record.policy is not None:
        echo(f"  model: {record.policy}")
    if record.data is not None:
        echo(f"  rows: {record.data}")
    for finding in findings(record):
        if finding.kind != "reward differs":  # the verdict says so
            echo(f"  {finding.label if finding.proof else 'finding'}: {finding}")
    for what, why in record.missing.items():
        echo(f"  not measured: {what} ({why})")


def _head(environment: Environment, release: str) -> None:
    echo(f"{environment.name} ({environment.kind}, domain {environment.domain or 'unknown'})")
    if environment.description:
        echo(environment.description)
    if environment.reward:
        echo(f"reward: {environment.reward}")
    echo(str(environment.path))
    verified = {True: "yes", False: "no", None: "not stated"}[environment.verified]
    echo(
        f"licence of its data: {', '.join(environment.licences) or 'not stated'}; verified by NeMo Gym: {verified}"
    )
    if environment.kind != "config":
        echo(f"source: https://github.com/NVIDIA-NeMo/Gym/tree/v{release}/{environment.known_as}")


def _configs(environment: Environment, current: EnvConfig) -> None:
    echo()
    print_table(
        ("config", "agents", "other model servers", "needs"),
        (
            (
                f"{config.name} *" if config is current and len(environment.configs) > 1 else config.name,
                _servers(config.agents) or "-",
                ", ".join(config.model_servers) or "-",
                ", ".join(config.need_kinds) or "none",
            )
            for config in environment.configs
        ),
    )


def _environment_servers(environment: Environment) -> None:
    owners = [
        (config.name, server) for config in environment.configs for server in config.environment_servers
    ]
    if owners:
        echo()
        print_table(
            ("config", "environment server", "of agents"),
            ((name, _servers([server]), ", ".join(server.called_agents)) for name, server in owners),
        )


def _servers(servers: Sequence[ServerInstance]) -> str:
    return ", ".join(f"{server.name} ({server.type})" for server in servers)


def _data(environment: Environment, config: EnvConfig) -> None:
    echo()
    if environment.data:
        print_table(
            ("data", "kind", "rows"),
            ((file.name, file.kind, str(file.rows())) for file in environment.data),
        )
    else:
        echo("no packaged data")
    absent = unshipped_datasets(environment, config)
    elsewhere = [
        f"{dataset.name} ({dataset.path}{f', {rows:,} rows' if (rows := environment.stated_rows(dataset)) else ''})"
        for dataset in absent
    ]
    if elsewhere:
        echo(f"declared but not in the release: {', '.join(elsewhere)}")
        echo(
            f"get it with `gymgate data prepare {environment.known_as}`"
            if environment.can_prepare(absent)
            else f"{REGISTRY_ONLY}; give your own rows with --data FILE"
        )


def _sandboxes(environment: Environment, config: EnvConfig) -> None:
    """The providers and images that a config asks for, once each."""
    images = environment.images or ()
    if config.sandboxes or images:
        echo()
    if config.sandboxes:
        described = [describe_sandbox(config, sandbox) for sandbox in config.sandboxes]
        print_table(
            ("sandbox of", "provider", "image"),
            (
                (
                    sandbox.server,
                    sandbox.provider or f"to be chosen: --sandbox (block {sandbox.name!r})",
                    ", ".join(sandbox.images) or "set by the rows or the server's code",
                )
                for sandbox in described
            ),
        )
    if images:
        echo(f"images of its packaged rows: {_some(images, IMAGES_SHOWN)}")


def _tools(environment: Environment) -> None:
    if environment.tools:
        echo(f"\ntools that its packaged rows offer: {_some(environment.tools, TOOLS_SHOWN)}")


def _some(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def _needs(environment: Environment, config: EnvConfig) -> None:
    echo()
    if environment.needs_data:
        echo("it has no rows that run: prepare them, or give your own with --data FILE")
    if config.is_self_judged:
        echo(f"config {config.name}: the policy is its own judge or user")
    if config.runs_code:
        echo(
            f"config {config.name} runs code that the model writes, with your rights, unless its settings confine it"
        )
    if config.runs_rows:
        echo(f"config {config.name} runs code that rows hold, with your rights")
    if not config.needs:
        if not (environment.needs_data or config.is_self_judged):
            echo(f"config {config.name} needs only the release and a policy")
        return
    echo(f"config {config.name} needs (estimated from its files):")
    for need in config.needs:
        echo(f"  {need.kind}: {need.detail}")
    if config.requirements:
        echo(
            f"{len(config.requirements)} Python requirement(s), installed on first use or by `gymgate setup`"
        )


def _first_prompt(environment: Environment) -> None:
    """The first row's conversation, where rows are at hand."""
    try:
        row = next(iter(open_rows("example", environment=environment)))
    except (ConfigError, DataError, StopIteration):
        return
    echo()
    echo("prompt of the first example row:")
    for entry in transcript(flat_row(row.data)):
        echo(f"  [{entry.role}] {cut(entry.text, LONGEST_PROMPT)}")
    fields = {name: value for name, value in row.data.items() if name not in _NOT_THE_ENVIRONMENTS}
    if fields:
        echo("other fields of that row:")
    for name, value in fields.items():
        echo(f"  {name}: {shortened(codec.dumps(value).decode(), LONGEST_FIELD)}")
