"""`gymgate check`: whether environments run here, by their recorded rollouts; no model, no key."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gymgate.api import load_catalog
from gymgate.cli.environments import checked_env_vars, environment_configs, parse_judges, writable_path
from gymgate.cli.options import Seconds
from gymgate.cli.output import log
from gymgate.config import DEFAULT_NEMO_GYM, RuntimeConfig
from gymgate.errors import ConfigError, GymgateError

if TYPE_CHECKING:
    from gymgate.check import Check, Job

KINDS = ("resources_servers", "environments", "benchmarks", "responses_api_agents")


@click.command("check")
@click.argument("environments", nargs=-1, metavar="ENV...")
@click.option("--all", "everything", is_flag=True, help="Every environment of the release (of --kind).")
@click.option(
    "--kind", type=click.Choice(KINDS), default="resources_servers", show_default=True, help="With --all."
)
@click.option("--gym", default=DEFAULT_NEMO_GYM, show_default=True, help="nemo-gym release.")
@click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True, help="Environments checked at once."
)
@click.option(
    "--json",
    "report",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep results in this file; what it has under the same settings is not checked again.",
)
@click.option(
    "--redo",
    multiple=True,
    type=click.Choice(["match", "differs", "blocked", "incomplete", "failed", "all"]),
    help="Check those again that the file has with this verdict.",
)
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a Markdown page of all results in --json.",
)
@click.option(
    "--judge",
    "judges",
    multiple=True,
    metavar="NAME=URL",
    help="Endpoint of a judge or simulator ('*': all): NAME=URL, NAME=MODEL@URL or NAME=policy. [recorded answers]",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override in the config of the one ENV, or @FILE: a YAML file of them.",
)
@click.option(
    "--env-var", "env_vars", multiple=True, metavar="NAME", help="Variable that the environments may see."
)
@click.option(
    "--start-timeout",
    type=Seconds(0, min_open=True),
    default=150.0,
    show_default=True,
    help="Seconds until all servers listen.",
)
@click.option(
    "--row-timeout",
    type=Seconds(0, min_open=True),
    default=180.0,
    show_default=True,
    help="Seconds per rollout; agents that start a program for each may want more.",
)
@click.option(
    "--timeout",
    type=Seconds(0, min_open=True),
    default=900.0,
    show_default=True,
    help="Seconds per environment.",
)
@click.option(
    "--memory",
    type=Seconds(0, min_open=True),
    default=8.0,
    show_default=True,
    help="GB that an environment may use.",
)
def command(
    environments: Sequence[str],
    everything: bool,
    kind: str,
    gym: str,
    jobs: int,
    report: Path | None,
    redo: Sequence[str],
    page: Path | None,
    judges: Sequence[str],
    settings: Sequence[str],
    env_vars: Sequence[str],
    start_timeout: float,
    row_timeout: float,
    timeout: float,
    memory: float,
) -> None:
    """Set environments up, start each, replay its recorded rollouts and compare the rewards.

    Prints a verdict per environment: match, differs, blocked (and by what), incomplete, failed. Exits with 1 if
    one failed. ENV may be a path to a config of your own, which is checked anew each time.
    """
    from gymgate.check import Job, load_report, save_report, status_page

    if page is not None and report is None:
        raise ConfigError("--page writes what is in a results file: give --json FILE, too")
    for path in filter(None, (report, page)):
        writable_path(path).parent.mkdir(parents=True, exist_ok=True)
    if not environments and not everything and page is None:
        raise ConfigError("name environments, or give --all")
    if settings and len(environments) != 1:
        raise ConfigError("--set is for one environment; name exactly one")
    overrides = environment_configs(environments, None, None, settings)[0].overrides if settings else ()
    known = load_report(report) if report is not None else []
    names = _all(gym, kind) if everything else _full_names(gym, environments) if environments else []
    wanted = [
        Job(
            environment=name,
            version=gym,
            models=tuple(sorted(parse_judges(judges).items())),
            overrides=overrides,
            env_vars=checked_env_vars(env_vars),
            start_timeout_s=start_timeout,
            row_timeout_s=row_timeout,
            timeout_s=timeout,
            memory_gb=memory,
        )
        for name in names
    ]
    checks = {(check.version, check.kind, check.environment): check for check in known}
    done = {key for key, check in checks.items() if "all" not in redo and check.verdict not in redo}
    todo = [job for job in wanted if not _is_done(job, checks, done)]
    if skipped := len(wanted) - len(todo):
        click.echo(f"{skipped} of {len(wanted)} are in {report} already", err=True)

    def landed(job: Job, outcome: Check | GymgateError) -> None:
        if isinstance(outcome, GymgateError):
            click.echo(f"{job.environment}: {outcome}", err=True)
            return
        checks[outcome.version, outcome.kind, outcome.environment] = outcome
        if report is not None:
            save_report(report, checks.values())
        _print(outcome)

    outcomes = asyncio.run(_run(todo, jobs, landed))
    if page is not None and report is not None:
        page.write_text(
            status_page(list(checks.values()), f"gymgate check --all --json {report.name} --page {page.name}")
        )
    fresh = [outcome for outcome in outcomes if not isinstance(outcome, GymgateError)]
    _summarise(fresh)
    if error := next((outcome for outcome in outcomes if isinstance(outcome, GymgateError)), None):
        raise error
    if any(check.verdict == "failed" for check in fresh):
        click.get_current_context().exit(1)


async def _run(todo: Sequence[Job], jobs: int, landed: object) -> list[Check | GymgateError]:
    from gymgate.check import check_all

    def say(job: Job, message: str) -> None:
        click.echo(f"{job.environment}: {message}", err=True)

    return await check_all(todo, at_once=jobs, done=landed, progress=say)  # type: ignore[arg-type]


def _all(gym: str, kind: str) -> list[str]:
    catalog = load_catalog(RuntimeConfig(version=gym), progress=log)
    every = catalog.agents() if kind == "responses_api_agents" else catalog.environments()
    return [f"{item.kind}/{item.name}" for item in every if item.kind == kind]


def _full_names(gym: str, names: Sequence[str]) -> list[str]:
    """With their kind, so that a name means one environment in a results file; paths stay as they are."""
    catalog = load_catalog(RuntimeConfig(version=gym), progress=log)
    found = [(name, catalog.find(name)) for name in names]
    return [name if item.kind == "config" else f"{item.kind}/{item.name}" for name, item in found]


def _is_done(job: Job, checks: dict[tuple[str, str, str], Check], done: set[tuple[str, str, str]]) -> bool:
    kind, _, name = job.environment.rpartition("/")
    key = (job.version, kind, name)
    return key in done and checks[key].settings == job.settings


def _print(check: Check) -> None:
    rewards = f" {check.matched}/{check.compared}" if check.compared else ""
    detail = f" ({check.detail})" if check.detail else ""
    click.echo(f"{check.environment}: {check.verdict}{rewards}{detail} [{check.seconds:g} s]")
    for broken in check.broken:
        click.echo(f"{check.environment}: skipped {broken}", err=True)


def _summarise(checks: Sequence[Check]) -> None:
    if len(checks) > 1:
        from gymgate.check.report import told_rewards

        counts = Counter(check.verdict for check in checks)
        told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        click.echo(f"{len(checks)} environments: {told}; {told_rewards(checks)}")
