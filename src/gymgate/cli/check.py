"""`gymgate check`: whether environments run here, by replaying their recorded rollouts; no model, no key."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from gymgate.api import load_catalog
from gymgate.catalog.resolve import provider_in
from gymgate.catalog.sandboxes import packaged_providers, sandbox_block
from gymgate.cli.environments import checked_env_vars, environment_configs, parse_judges, writable_path
from gymgate.cli.options import (
    KINDS,
    Seconds,
    env_var_option,
    gym_option,
    judge_key_var_option,
    judge_option,
    kind_option,
    routing_option,
    sandbox_option,
    set_option,
)
from gymgate.cli.output import log
from gymgate.cli.recording import RecordOptions, record_options
from gymgate.config import Routing, RuntimeConfig
from gymgate.errors import ConfigError, GymgateError
from gymgate.runtime.sandboxes import why_unusable

if TYPE_CHECKING:
    from gymgate.check import CheckRequest, CheckResult

_VERDICTS = ("match", "differs", "blocked", "incomplete", "failed")
_AGENTS = "responses_api_agents"
_SHOWN_ROWS = 5
"""Rows of an environment whose rewards differ that are printed."""
_file = click.Path(path_type=Path, dir_okay=False)
_limit = partial(click.option, type=Seconds(0, min_open=True), show_default=True, metavar="SECONDS")


@click.command("check")
@click.argument("environments", nargs=-1, metavar="ENV...")
@click.option(
    "--all", "everything", is_flag=True, help="Every resources server of the release, or of --kind."
)
@kind_option
@gym_option
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Environments checked at the same time.",
)
@click.option(
    "-o",
    "--output",
    type=_file,
    help="Results file (JSON). An environment with a result of the same settings is not checked again.",
)
@click.option(
    "--redo",
    multiple=True,
    type=click.Choice([*_VERDICTS, "all"]),
    help="Check environments again that have this verdict in the results file. Repeatable.",
)
@click.option("--page", type=_file, help="Write a Markdown page of everything in the results file.")
@judge_option
@judge_key_var_option
@set_option
@sandbox_option
@routing_option
@env_var_option
@_limit("--start-timeout", default=150.0, help="Seconds in which every server must answer.")
@_limit(
    "--timeout",
    default=180.0,
    help="Seconds per rollout.",
)
@_limit("--environment-timeout", default=900.0, help="Seconds per environment.")
@_limit("--memory", default=8.0, metavar="GB", help="Memory that an environment may use.")
@click.option(
    "--logs", type=click.Path(path_type=Path, file_okay=False), help="Directory for the servers' output."
)
@click.option("-v", "--verbose", is_flag=True, help="Print the servers' output after each environment.")
@record_options
def command(
    environments: Sequence[str],
    everything: bool,
    kind: str | None,
    gym: RuntimeConfig,
    jobs: int,
    output: Path | None,
    redo: Sequence[str],
    page: Path | None,
    judges: Sequence[str],
    judge_key_vars: Sequence[str],
    settings: Sequence[str],
    sandbox: str | None,
    routing: Routing | None,
    env_vars: Sequence[str],
    start_timeout: float,
    timeout: float,
    environment_timeout: float,
    memory: float,
    logs: Path | None,
    verbose: bool,
    own: Sequence[str],
    recording: RecordOptions,
) -> None:
    """Replay recorded rollouts and compare the rewards.

    Sets environments up and starts each. Prints a verdict per environment: match, differs, blocked (and by what),
    incomplete, failed, with the rewards that differ, or the exception of a server. Exits with 1 if one differs or failed.
    Judges give their recorded answers unless --judge names an endpoint. ENV
    may be a path to a config of your own, which is checked anew each time.

    With --record, -b or a threshold it also measures the environment for its quality record, which takes a few minutes
    more, and exits with 1 if a threshold is not met.
    """
    from gymgate.check import CheckRequest, check_all, load_report, save_report, status_page

    if page is not None and output is None:
        raise ConfigError("--page writes the page from a results file; name one with -o FILE")
    environments = (*environments, *own)
    for path in filter(None, (output, page)):
        writable_path(path).parent.mkdir(parents=True, exist_ok=True)
    if not environments and not everything and page is None:
        raise ConfigError("name environments, or give --all")
    if settings and len(environments) != 1:
        raise ConfigError("--set is for one environment; name exactly one")
    if sandbox is not None:
        # Checked here, because the verdict on each environment would be that it is blocked.
        _refuse_sandbox(sandbox, load_catalog(gym, progress=log).site)
    overrides = environment_configs(environments, (), None, settings)[0].overrides if settings else ()
    measuring = recording.request_fields()
    if logs is not None:
        writable_path(logs / "server.log")
    elif verbose:
        logs = Path(click.get_current_context().with_resource(TemporaryDirectory(prefix="gymgate-check-")))
    requests = [
        CheckRequest(
            environment=name,
            version=gym.version,
            interpreter=gym.interpreter,
            models=tuple(sorted(parse_judges(judges, judge_key_vars).items())),
            overrides=overrides,
            sandbox=sandbox,
            routing=routing,
            env_vars=checked_env_vars(env_vars),
            start_timeout_s=start_timeout,
            row_timeout_s=timeout,
            timeout_s=environment_timeout,
            memory_gb=memory,
            logs=str((logs / Path(name).stem).absolute()) if logs is not None else None,
            **measuring,
        )
        for name in _names(gym, kind, environments, everything=everything)
    ]
    recording.check_target([request.environment for request in requests])
    kept = {_key(result): result for result in (load_report(output) if output is not None else [])}
    todo = [request for request in requests if not _is_done(request, kept, redo, recording)]
    if skipped := len(requests) - len(todo):
        log(
            f"not checked again: {skipped} of {len(requests)} environments, whose results are in {output or recording.target}"
        )

    def finished(request: CheckRequest, outcome: CheckResult | GymgateError) -> None:
        if isinstance(outcome, GymgateError):
            log(f"{request.environment}: {outcome}")
            return
        kept[_key(outcome)] = outcome
        if output is not None:
            save_report(output, kept.values())
        _print(outcome)
        if request.logs is not None:
            _show_logs(Path(request.logs), verbose=verbose)
        if recording.wanted:
            recording.finish(outcome)

    def progress(request: CheckRequest, message: str) -> None:
        log(f"{request.environment}: {message}")

    outcomes = asyncio.run(check_all(todo, at_once=jobs, done=finished, progress=progress))
    if page is not None and output is not None:
        made_by = f"gymgate check --all -o {output.name} --page {page.name}"
        page.write_text(status_page([*kept.values()], made_by))
    results = [outcome for outcome in outcomes if not isinstance(outcome, GymgateError)]
    _print_summary(results)
    if error := next((outcome for outcome in outcomes if isinstance(outcome, GymgateError)), None):
        raise error
    if recording.missed or any(result.verdict in ("differs", "failed") for result in results):
        click.get_current_context().exit(1)


def _refuse_sandbox(sandbox: str, site: Path) -> None:
    """Raises `ConfigError` for a provider that there is not, or that cannot be used here."""
    block = sandbox_block(sandbox, site)
    provider = str(provider_in(block))
    if reason := why_unusable(provider, block[provider] or {}, packaged_providers(site)):
        raise ConfigError(reason)


def _names(gym: RuntimeConfig, kind: str | None, named: Sequence[str], *, everything: bool) -> list[str]:
    """The environments to check, with their kind, so that a name means one environment in a results file. Paths stay."""
    if not everything and not named:
        return []
    catalog = load_catalog(gym, progress=log)
    if not everything:
        found = [(name, catalog.find(name)) for name in named]
        return [name if each.kind == "config" else each.known_as for name, each in found]
    directory = next((name for name, value in KINDS.items() if value == kind), "resources_servers")
    every = catalog.agents() if directory == _AGENTS else catalog.environments()
    return [each.known_as for each in every if each.kind == directory]


def _key(result: CheckResult) -> tuple[str, str, str]:
    return result.version, result.kind, result.environment


def _is_done(
    request: CheckRequest,
    kept: dict[tuple[str, str, str], CheckResult],
    redo: Sequence[str],
    recording: RecordOptions,
) -> bool:
    kind, _, name = request.environment.rpartition("/")
    if kind in ("", "config") or name.endswith((".yaml", ".yml")):  # a user's own
        return False
    found: list[tuple[str, str] | None] = []
    if kept or recording.target is None:
        result = kept.get((request.version, kind, name))
        found.append((result.verdict, result.settings) if result else None)
    if recording.target is not None:
        found.append(recording.kept(f"{kind}/{name}-{request.version}"))
    return "all" not in redo and all(
        each is not None and each[0] not in redo and each[1] == request.settings for each in found
    )


def _print(result: CheckResult) -> None:
    rewards = f" {result.matched}/{result.compared}" if result.compared else ""
    detail = f" ({result.detail})" if result.detail else ""
    click.echo(f"{result.environment}: {result.verdict}{rewards}{detail} [{result.seconds:g} s]")
    differing = [row for row in result.rows if row.verdict == "differs"]
    for row in differing[:_SHOWN_ROWS]:
        recorded = "no reward" if row.recorded is None else f"{row.recorded:g}"
        reward = f"{row.reward:g}" if row.reward is not None else row.error or row.cause
        click.echo(f"  {row.recording}: expected {recorded}, got {reward}")
    if len(differing) > _SHOWN_ROWS:
        click.echo(f"  and {len(differing) - _SHOWN_ROWS} more")
    if result.traceback:
        click.echo(result.traceback)
    for broken in result.broken:
        log(f"{result.environment}: skipped {broken}")


def _show_logs(directory: Path, *, verbose: bool) -> None:
    """Put the logs of a stack that has stopped into the directory itself, and print them."""
    found = sorted(directory.glob("*/logs/*/*.log"))
    for path in found:
        path.replace(directory / path.name)
    for stack in {path.parents[2] for path in found}:
        shutil.rmtree(stack, ignore_errors=True)
    for path in sorted(directory.glob("*.log")) if verbose else ():
        text = path.read_text(errors="replace")
        click.echo(f"== {path.name}\n{text}", err=True)


def _print_summary(results: Sequence[CheckResult]) -> None:
    if len(results) > 1:
        from gymgate.check.report import count_rewards

        counts = Counter(result.verdict for result in results)
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        click.echo(f"{len(results)} environments: {verdicts}; {count_rewards(results)}")
