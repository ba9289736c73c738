"""`gymgate list`: the environments of a nemo-gym release."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
import orjson

from gymgate.config import DEFAULT_NEMO_GYM, RuntimeConfig
from gymgate.errors import ConfigError

if TYPE_CHECKING:
    from gymgate.catalog import Catalog, Environment

KINDS = {"resources_servers": "resources", "environments": "environment", "benchmarks": "benchmark"}
NEEDS = ("package", "judge", "key", "docker", "download", "git", "gpu", "binary", "config", "search")


@click.command()
@click.argument("pattern", required=False)
@click.option("--name", "pattern_option", metavar="PATTERN", help="The same as the argument.")
@click.option("--domain", metavar="DOMAIN", help="Only this domain: math, agent, knowledge, ...")
@click.option(
    "--kind", type=click.Choice(list(KINDS.values())), help="Only this kind: its directory in the release."
)
@click.option(
    "--needs",
    type=click.Choice(["none", *NEEDS]),
    multiple=True,
    help="Only environments that need one of these; `none`: they need only the wheel and a policy.",
)
@click.option(
    "--without",
    type=click.Choice(NEEDS),
    multiple=True,
    help="Leave out environments that need one of these.",
)
@click.option(
    "--gym", default=DEFAULT_NEMO_GYM, show_default=True, metavar="VERSION", help="nemo-gym release."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    pattern: str | None,
    pattern_option: str | None,
    domain: str | None,
    kind: str | None,
    needs: Sequence[str],
    without: Sequence[str],
    gym: str,
    as_json: bool,
) -> None:
    """List the environments of a nemo-gym release and what each needs.

    PATTERN is part of a name, or a glob. The needs are those of an environment's default config. They are estimated from
    its files; nothing is run.
    """
    environments = read_catalog(gym).environments(progress=_tell)
    shown = [
        environment
        for environment in environments
        if all(matches(environment, part) for part in (pattern, pattern_option))
        and domain in (None, environment.domain)
        and kind in (None, KINDS[environment.kind])
        and fits(environment, needs, without)
    ]
    names = short_names(environments)
    if as_json:
        click.echo(orjson.dumps([summary(item, names) for item in shown], option=orjson.OPT_INDENT_2))
        return
    if not shown:
        click.echo(f"no environment of nemo-gym {gym} matches (of {len(environments)})", err=True)
        return
    from gymgate.cli.output import print_table

    header = ("environment", "kind", "domain", "agents", "data", "needs")
    print_table(header, (_row(item, names) for item in shown))


def read_catalog(version: str) -> Catalog:
    """The catalog of a release. Installs the release if needed and prints progress to stderr."""
    from gymgate.catalog import Catalog
    from gymgate.runtime import ensure_runtime

    runtime = ensure_runtime(RuntimeConfig(version=version), progress=_tell)
    return Catalog(runtime.site, runtime.version)


def _tell(message: str) -> None:
    click.echo(message, err=True)


def matches(environment: Environment, pattern: str | None) -> bool:
    """Whether a pattern is part of `name` or `kind/name`, or a glob that matches one of them; `None` matches all."""
    if pattern is None:
        return True
    full = f"{environment.kind}/{environment.name}"
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(environment.name, pattern) or fnmatch.fnmatchcase(full, pattern)
    return pattern in full if "/" in pattern else pattern in environment.name


def fits(environment: Environment, needs: Collection[str], without: Iterable[str]) -> bool:
    """Whether the default config needs one of `needs`, if any are given, and none of `without`."""
    own = set(environment.config().need_kinds)
    wanted = not needs or not own.isdisjoint(needs) or ("none" in needs and not own)
    return wanted and own.isdisjoint(without)


def short_names(environments: Iterable[Environment]) -> dict[tuple[str, str], str]:
    """The shortest name that finds each (kind, name): the bare name for the first kind that has it."""
    taken: dict[str, str] = {}
    order = list(KINDS)
    for environment in sorted(environments, key=lambda item: order.index(item.kind)):
        taken.setdefault(environment.name, environment.kind)
    return {
        (item.kind, item.name): item.name if taken[item.name] == item.kind else f"{item.kind}/{item.name}"
        for item in environments
    }


def summary(environment: Environment, names: dict[tuple[str, str], str]) -> dict[str, Any]:
    """An environment as `--json` shows it."""
    config = environment.config()
    return {
        "environment": names[environment.kind, environment.name],
        "name": environment.name,
        "kind": environment.kind,
        "domain": environment.domain,
        "description": environment.description,
        "config": config.name,
        "agents": [agent.type for agent in config.agents],
        "needs": [{"kind": need.kind, "detail": need.detail} for need in config.needs],
        "data": [file.name for file in environment.data if file.kind == "rows"],
        "recordings": [file.name for file in environment.recordings()],
    }


def _row(environment: Environment, names: dict[tuple[str, str], str]) -> tuple[str, ...]:
    config = environment.config()
    return (
        names[environment.kind, environment.name],
        KINDS[environment.kind],
        environment.domain or "-",
        ", ".join(dict.fromkeys(agent.type for agent in config.agents)) or "-",
        _default_data(environment),
        ", ".join(config.need_kinds) or "none",
    )


def _default_data(environment: Environment) -> str:
    """Name of the packaged rows that run by default; `raw` if they need a prompt first; `-` if there are none."""
    try:
        file = environment.data_file()
    except ConfigError:
        return "-"
    return file.name if file.kind == "rows" else file.kind
