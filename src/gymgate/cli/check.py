"""`gymgate check`: whether environments run here, by replaying their recorded rollouts; no model, no key."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from gymgate.cli.environments import (
    checked_env_vars,
    config_names,
    environment_configs,
    parse_judges,
    writable_path,
)
from gymgate.cli.options import (
    DIRECTORY,
    FILE,
    KINDS,
    EndpointOptions,
    Finite,
    GroupedCommand,
    Seconds,
    config_option,
    endpoint_options,
    env_var_option,
    gym_option,
    json_option,
    judge_key_var_option,
    judge_option,
    kind_option,
    number_option,
    option,
    repeats_option,
    routing_option,
    sandbox_option,
    seconds_option,
    set_option,
)
from gymgate.cli.output import echo, log, print_json
from gymgate.cli.policies import policy_endpoint, refuse_without_endpoint
from gymgate.core.config import Routing, RuntimeConfig
from gymgate.core.errors import ConfigError, GymgateError
from gymgate.gym.catalog.entries import AGENT_KIND
from gymgate.gym.catalog.sandboxes import packaged_providers, sandbox_block
from gymgate.gym.inside.resolve import provider_in
from gymgate.gym.runtime import open_catalog
from gymgate.gym.runtime.sandbox_providers import why_unusable
from gymgate.runs.policies import ask_judges

if TYPE_CHECKING:
    from gymgate.quality import CheckRequest, CheckResult
    from gymgate.quality.record.findings import Thresholds

SECTIONS = ("shape", "deterministic", "cost", "trivial", "oracle", "policy", "failures")
"""Sections of a record that need a running environment."""
WITHOUT_RECORDINGS = frozenset({"shape", "oracle", "policy"})
"""Those that need no replayed recording."""
_SHOWN_ROWS = 5
"""Rows of an environment whose rewards differ that are printed."""


@click.command("check", cls=GroupedCommand)
@click.argument("environments", nargs=-1, metavar="ENV...")
@option(
    "Environment",
    "--all",
    "everything",
    is_flag=True,
    help="Every resources server of the release, or of --kind.",
)
@kind_option
@gym_option
@number_option("--jobs", default=1, help="Environments checked at the same time.", group="Limits")
@config_option
@judge_option
@judge_key_var_option
@set_option
@sandbox_option
@routing_option
@env_var_option
@seconds_option(
    "--start-timeout", default=150.0, help="Seconds in which every server must answer.", group="Limits"
)
@seconds_option("--timeout", default=180.0, help="Seconds per rollout.", group="Limits")
@seconds_option("--environment-timeout", default=900.0, help="Seconds per environment.", group="Limits")
@option(
    "Limits",
    "--memory",
    type=Seconds(0, min_open=True),
    default=8.0,
    show_default=True,
    metavar="GB",
    help="Memory that an environment may use.",
)
@option("Output", "--logs", type=DIRECTORY, help="Directory for the servers' output.")
@option("Output", "-v", "--verbose", is_flag=True, help="Print the servers' output after each environment.")
@option(
    "Measurements",
    "--record",
    "records",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Measure quality, and write the record of each environment to DIR/KIND/ENV-RELEASE.json. An environment with a "
    "record of the same options that did not fail is not checked again.",
)
@option(
    "Measurements",
    "--rows-only",
    is_flag=True,
    help="Only read the rows: duplicates, answers in prompts, rows in two splits. Starts no server. With --record, the rest "
    "of the record in DIR, else of the one that ships with gymgate, stays.",
)
@option(
    "Measurements",
    "--rows-file",
    "rows_files",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="With --rows-only: read the rows of this file instead of the packaged ones. Repeatable.",
)
@option(
    "Measurements",
    "--section",
    "sections",
    type=click.Choice(SECTIONS),
    multiple=True,
    help="Measure only this section of the record. Repeatable. With --record, the rest of the record in DIR, else of the one "
    "that ships with gymgate, stays. [all; policy with -b]",
)
@number_option("-n", "--rows", help="Packaged rows for the model of -b. [all]", group="Rows")
@repeats_option
@option(
    "Thresholds",
    "--max-constant-reward",
    type=Finite(),
    metavar="REWARD",
    help="Mean reward of an empty answer, a fixed sentence, the prompt, or another row's best answer.",
)
@option("Thresholds", "--deterministic", is_flag=True, help="Scoring again gives the same rewards.")
@option("Thresholds", "--reproducible", is_flag=True, help="Every recorded reward is reproduced.")
@option(
    "Thresholds",
    "--honest",
    is_flag=True,
    help="No reward where the judge, a tool or the policy failed.",
)
@option(
    "Thresholds",
    "--min-oracle-reward",
    type=Finite(),
    metavar="REWARD",
    help="Mean reward of the right answer, as the rows hold it, in its best phrasing.",
)
@option(
    "Thresholds",
    "--clean-rows",
    is_flag=True,
    help="No row equals another, no prompt says its answer, no row is in two splits.",
)
@endpoint_options
@json_option
def command(
    environments: Sequence[str],
    everything: bool,
    kind: str | None,
    gym: RuntimeConfig,
    jobs: int,
    config: Sequence[str],
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
    records: Path | None,
    rows_only: bool,
    rows_files: Sequence[Path],
    sections: Sequence[str],
    rows: int | None,
    repeats: int,
    endpoint: EndpointOptions,
    as_json: bool,
    **limits: Any,
) -> None:
    """Replay recorded rollouts and compare the rewards.

    Sets environments up and starts each. Prints a verdict per environment: match, differs, blocked (and by what),
    incomplete, failed, with the rewards that differ, or the exception of a server. Exits with 1 if one differs or failed.
    Judges give their recorded answers unless --judge gives an endpoint. ENV may be the path of a config file, which
    is checked anew each time.

    With --record, -b or a threshold it also measures the environment's quality, which takes a few minutes more, and exits
    with 1 if a threshold is not met.
    """
    from gymgate.quality import CheckRequest, check_all
    from gymgate.quality.record.files import record_path, save_record
    from gymgate.quality.record.findings import Thresholds

    if not environments and not everything:
        raise ConfigError("name environments, or give --all")
    for flag, given in (("--set", settings), ("--config", config)):
        if given and len(environments) != 1:
            raise ConfigError(f"{flag} is for one environment; name exactly one")
    if sandbox is not None:
        # Checked here, because the verdict on each environment would be that it is blocked.
        _refuse_sandbox(sandbox, open_catalog(gym, progress=log).site)
    overrides = environment_configs(environments, (), None, settings)[0].overrides if settings else ()
    refuse_without_endpoint(endpoint)
    has_model = endpoint.urls is not None
    for flag, is_given in (("-n", rows is not None), ("-r", repeats > 1)):
        if is_given and not has_model:
            raise ConfigError(f"{flag} is for the rows of a model; give its endpoint with -b")
    if rows_only and has_model:
        raise ConfigError("--rows-only runs no row; leave -b out")
    if rows_only and sections:
        raise ConfigError("--rows-only measures one section; leave --section out")
    if sections and ("policy" in sections) != has_model:
        raise ConfigError("--section policy needs a model's endpoint (-b), and -b that section")
    _refuse_rows_files(rows_files, environments, rows_only=rows_only, records=records)
    policy = policy_endpoint(endpoint, log) if has_model else None
    models = parse_judges(judges, judge_key_vars)
    if not rows_only:
        models = ask_judges(models, endpoint.wait_for_policy or 0, log)
    if logs is not None:
        writable_path(logs / "server.log")
    elif verbose:
        logs = Path(click.get_current_context().with_resource(TemporaryDirectory(prefix="gymgate-check-")))
    if records is not None:
        writable_path(records / "record.json")
    thresholds = Thresholds(**limits)
    requests = [
        CheckRequest(
            environment=name,
            version=gym.version,
            interpreter=gym.interpreter,
            config=config_names(config),
            models=tuple(sorted(models.items())),
            overrides=overrides,
            sandbox=sandbox,
            routing=routing,
            env_vars=checked_env_vars(env_vars),
            start_timeout_s=start_timeout,
            row_timeout_s=timeout,
            timeout_s=environment_timeout,
            memory_gb=memory,
            logs=str((logs / Path(name).stem).absolute()) if logs is not None else None,
            measure=bool(records or policy or sections) or thresholds != Thresholds(),
            policy=policy.model_copy(update={"api_key": None}) if policy is not None else None,
            policy_rows=rows,
            policy_repeats=repeats,
            sections=tuple(sorted({*sections})),
        )
        for name in _names(gym, kind, environments, everything=everything)
    ]
    if rows_only:
        _read_rows(requests, gym, records, rows_files, thresholds, as_json=as_json)
        return
    kept = _kept(requests, records) if records is not None else {}
    if kept:
        log(f"not checked again: {len(kept)} of {len(requests)} environments; their records are in {records}")
    todo = [request for request in requests if request.environment not in kept]
    known = _known(todo, records) if records is not None and sections else {}
    if WITHOUT_RECORDINGS.issuperset(sections):
        todo = [each.model_copy(update={"replay": each.environment not in known}) for each in todo]
    missed: list[str] = []

    def whole(request: CheckRequest, outcome: CheckResult) -> CheckResult:
        record = known.get(request.environment)
        return outcome if record is None else record.with_sections(sections, outcome)

    def show(result: CheckResult) -> None:
        if not as_json:
            _print(result)
            for name in filter(result.missing.get, sections):
                echo(f"  not measured: {name} ({result.missing[name]})")
        missed.extend(_missed(result, thresholds))

    def finished(request: CheckRequest, outcome: CheckResult | GymgateError) -> None:
        if isinstance(outcome, GymgateError):
            log(f"{request.environment}: {outcome}")
            return
        show(outcome := whole(request, outcome))
        if request.logs is not None:
            _show_logs(Path(request.logs), verbose=verbose)
        if records is not None:
            save_record(path := record_path(records, outcome.name), outcome)
            log(f"{outcome.environment}: record in {path}")

    def progress(request: CheckRequest, message: str) -> None:
        log(f"{request.environment}: {message}")

    for result in kept.values():
        show(result)
    outcomes = asyncio.run(check_all(todo, at_once=jobs, done=finished, progress=progress))
    pairs = zip(todo, outcomes, strict=True)
    checked = [whole(request, each) for request, each in pairs if not isinstance(each, GymgateError)]
    results = [*kept.values(), *checked]
    if as_json:
        print_json(results)
    else:
        _print_summary(results)
    if error := next((outcome for outcome in outcomes if isinstance(outcome, GymgateError)), None):
        raise error
    if missed or any(result.verdict in ("differs", "failed") for result in results):
        click.get_current_context().exit(1)


def _refuse_rows_files(
    rows_files: Sequence[Path], environments: Sequence[str], *, rows_only: bool, records: Path | None
) -> None:
    """Raises `ConfigError` where rows of the user's own have no meaning."""
    if rows_files and not rows_only:
        raise ConfigError("--rows-file gives rows for --rows-only; give both")
    if rows_files and len(environments) != 1:
        raise ConfigError("--rows-file is for one environment; name exactly one")
    if rows_files and records is not None:
        raise ConfigError("a record is of the packaged rows; leave out --record or --rows-file")
    if absent := next((path for path in rows_files if not path.is_file()), None):
        raise ConfigError(f"no file of rows at {str(absent)!r}")


def _read_rows(
    requests: Sequence[CheckRequest],
    gym: RuntimeConfig,
    records: Path | None,
    rows_files: Sequence[Path],
    thresholds: Thresholds,
    *,
    as_json: bool,
) -> None:
    """Print what each environment's rows show, and add it to its record in `records`."""
    from gymgate.quality.record.files import load_record, record_path, save_record
    from gymgate.quality.record.findings import row_findings
    from gymgate.quality.rows_only import read_rows

    catalog = open_catalog(gym, progress=log)
    results = []
    for request in requests:
        found = catalog.find(request.environment, request.config)
        path = record_path(records, f"{found.kind}/{found.name}-{catalog.version}") if records else None
        known = load_record(path) if path is not None else None
        results.append(result := read_rows(request, catalog, known, rows_files))
        if path is not None:
            save_record(path, result)
        if not as_json:
            echo(f"{result.environment}: {result.data}")
            for finding in row_findings(result):
                echo(f"  {finding}")
    if as_json:
        print_json([result.model_dump(mode="json") for result in results])
    missed = [_missed(result, thresholds) for result in results]
    if any(missed):
        click.get_current_context().exit(1)


def _refuse_sandbox(sandbox: str, site: Path) -> None:
    """Raises `ConfigError` for a provider that there is not, or that cannot be used here."""
    block = sandbox_block(sandbox, site)
    provider = str(provider_in(block))
    if reason := why_unusable(provider, block[provider] or {}, packaged_providers(site)):
        raise ConfigError(reason)


def _names(gym: RuntimeConfig, kind: str | None, named: Sequence[str], *, everything: bool) -> list[str]:
    """The environments to check, with their kind, so that a name means one environment among records. Paths stay."""
    catalog = open_catalog(gym, progress=log)
    if not everything:
        found = [(name, catalog.find(name)) for name in named]
        return [name if each.kind == "config" else each.known_as for name, each in found]
    directory = next((name for name, value in KINDS.items() if value == kind), "resources_servers")
    every = catalog.agents() if directory == AGENT_KIND else catalog.environments()
    return [each.known_as for each in every if each.kind == directory]


def _kept(requests: Iterable[CheckRequest], records: Path) -> dict[str, CheckResult]:
    """The packaged environments with a record of the same settings that did not fail, and their records.

    Raises `ConfigError` for two configs of the user that would have one record, `DataError` for a file that is none.
    """
    from gymgate.quality.record.files import load_record, record_path

    own: dict[str, str] = {}
    kept: dict[str, CheckResult] = {}
    for request in requests:
        name = request.environment
        if name.endswith((".yaml", ".yml")):
            if (other := own.setdefault(Path(name).stem, name)) != name:
                raise ConfigError(f"{other} and {name} would have one record; check one at a time")
            continue
        record = load_record(record_path(records, f"{name}-{request.version}"))
        if record is not None and record.settings == request.settings and record.verdict != "failed":
            kept[name] = record
    return kept


def _known(requests: Iterable[CheckRequest], records: Path) -> dict[str, CheckResult]:
    """The records that the requested sections are added to: those in `records`, else those that ship with gymgate."""
    from gymgate.quality.record.files import load_record, record_path, shipped_record

    known: dict[str, CheckResult] = {}
    for request in requests:
        kind, _, name = request.environment.rpartition("/")
        if name.endswith((".yaml", ".yml")):
            kind, name = "config", Path(name).stem
        record = load_record(record_path(records, f"{kind}/{name}-{request.version}"))
        record = record or shipped_record(kind, name, request.version)
        if record is not None and record.verdict != "failed":
            known[request.environment] = record
    return known


def _missed(result: CheckResult, thresholds: Thresholds) -> list[str]:
    """The thresholds that a result does not meet, logged."""
    from gymgate.quality.record.findings import unmet_thresholds

    lines = list(unmet_thresholds(result, thresholds))
    for line in lines:
        log(f"{result.environment}: threshold not met: {line}")
    return lines


def _print(result: CheckResult) -> None:
    from gymgate.quality.record.findings import findings

    rewards = f" {result.matched}/{result.compared}" if result.compared else ""
    detail = f" ({result.detail})" if result.detail else ""
    echo(f"{result.environment}: {result.verdict}{rewards}{detail} [{result.seconds:g} s]")
    differing = [row for row in result.rows if row.verdict == "differs"]
    for row in differing[:_SHOWN_ROWS]:
        recorded = "no reward" if row.recorded is None else f"{row.recorded:g}"
        reward = f"{row.reward:g}" if row.reward is not None else row.error or row.cause
        echo(f"  {row.recording}: expected {recorded}, got {reward}")
    if len(differing) > _SHOWN_ROWS:
        echo(f"  and {len(differing) - _SHOWN_ROWS} more")
    if result.traceback:
        echo(result.traceback)
    elif result.verdict == "failed" and result.evidence not in result.detail:
        echo(f"  {result.evidence}")
    for broken in result.broken:
        log(f"{result.environment}: skipped {broken}")
    for finding in findings(result) if result.measured else ():
        echo(f"  {finding}")
    if result.policy is not None:
        echo(f"  {result.policy}")


def _show_logs(directory: Path, *, verbose: bool) -> None:
    """Put the logs of a stack that has stopped into the directory itself, and print them."""
    found = sorted(directory.glob("*/logs/*/*.log"))
    for path in found:
        path.replace(directory / path.name)
    for stack in {path.parents[2] for path in found}:
        shutil.rmtree(stack, ignore_errors=True)
    for path in sorted(directory.glob("*.log")) if verbose else ():
        text = path.read_text(errors="replace")
        echo(f"== {path.name}\n{text}", err=True)


def _print_summary(results: Sequence[CheckResult]) -> None:
    if len(results) < 2:
        return
    counts = Counter(result.verdict for result in results)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    stood_in = sum(result.rewarded_by_stand_in and not result.rewarded for result in results)
    rewarded = sum(result.rewarded for result in results) + stood_in
    by = f", {stood_in} of them with a stand-in for the judge" if stood_in else ""
    echo(f"{len(results)} environments: {verdicts}; {rewarded} returned a reward{by}")
