"""`gymgate check`: whether environments run here, by replaying their recorded rollouts; no model, no key."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import click

from gymgate.cli.environments import endpoint_fields, environment_configs, stack_fields, writable_path
from gymgate.cli.options import (
    DIRECTORY,
    ENDPOINT_OPTIONS,
    FILE,
    KINDS,
    GroupedCommand,
    add_options,
    config_option,
    env_var_option,
    field_option,
    gym_option,
    json_option,
    judge_key_var_option,
    judge_option,
    kind_option,
    number_option,
    option,
    option_fields,
    repeats_option,
    routing_option,
    sandbox_option,
    set_option,
)
from gymgate.cli.output import echo, log, log_next, print_json
from gymgate.core import codec
from gymgate.core.config import EnvironmentConfig, HTTPEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, GymgateError
from gymgate.core.files import replacing
from gymgate.gym.catalog.entries import AGENT_KIND, PACKAGED_KINDS
from gymgate.gym.runtime import open_catalog
from gymgate.quality.diagnosis import refuse_sandbox
from gymgate.quality.model import (
    WITHOUT_RECORDINGS,
    CheckRequest,
    CheckResult,
    SectionName,
    Thresholds,
)
from gymgate.quality.sections import OF_ORACLE, WITHOUT_ANSWER, ProbeName
from gymgate.runs.collected.policies import ask_judges, endpoint_with_model

_SHOWN_ROWS = 5
"""Rows of an environment whose rewards differ that are printed."""


SHOWN_OPTIONS = (
    *("--all", "-b", "-m", "--judge", "--set", "--gym"),
    *("--record", "--section", "--probe", "-v", "--json"),
    *("--max-constant-reward", "--deterministic", "--reproducible", "--honest"),
    *("--min-oracle-reward", "--no-flags", "--clean-rows"),
)
"""Options that `--help` lists."""


@click.command("check", cls=GroupedCommand, shown=SHOWN_OPTIONS)
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
@field_option(
    "Limits",
    StackConfig,
    "start_timeout_s",
    "--start-timeout",
    default=CheckRequest.stack_defaults()["start_timeout_s"],
    help="Seconds in which every server must answer.",
)
@field_option(
    "Limits",
    RolloutLimits,
    "timeout_s",
    "--timeout",
    default=CheckRequest.model_fields["limits"].default.timeout_s,
    help="Seconds per rollout.",
)
@field_option("Limits", CheckRequest, "timeout_s", "--environment-timeout", "environment_timeout")
@field_option("Limits", CheckRequest, "memory_gb", "--memory", metavar="GB")
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
    "of the record stays as it is in DIR, or as it ships with gymgate.",
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
@field_option(
    "Measurements",
    CheckRequest,
    "sections",
    "--section",
    "sections",
    type=click.Choice(get_args(SectionName)),
    help="Measure only this section of the record. Repeatable. With --record, the rest of the record stays as it is in DIR, "
    "or as it ships with gymgate. [all; policy with -b]",
)
@field_option(
    "Measurements",
    CheckRequest,
    "probes",
    "--probe",
    "probes",
    type=click.Choice(get_args(ProbeName)),
    metavar="NAME",
)
@field_option("Rows", CheckRequest, "rows", "-n", "--rows")
@repeats_option
@add_options(
    tuple(field_option("Thresholds", Thresholds, name, metavar="REWARD") for name in Thresholds.model_fields)
)
@option(
    "Output",
    "--artifact",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write what was evaluated, what was skipped and why, metrics, findings and unmet thresholds of one environment, e.g. "
    "to autoqc_artifact.json.",
)
@add_options(ENDPOINT_OPTIONS)
@json_option
@click.pass_context
def command(
    context: click.Context,
    /,
    logs: Path | None,
    verbose: bool,
    records: Path | None,
    artifact: Path | None,
    rows_only: bool,
    rows_files: Sequence[Path],
    jobs: int,
    as_json: bool,
    **_: Any,
) -> None:
    """Replay recorded rollouts and compare the rewards.

    Starts each environment, replays its recorded rollouts and prints a verdict: match, differs (with the rewards), blocked (by
    what), incomplete, or failed (with the server's exception). Exits with 1 if an environment differs or failed. Judges give
    their recorded answers unless --judge gives an endpoint. ENV can also be the path of a config file.

    With --record, -b or a threshold it also measures the environment's quality, which takes a few minutes more, and exits
    with 1 if a threshold is not met.
    """
    _refuse_misfits(context)
    for path in filter(None, (logs and logs / "server.log", records and records / "record.json", artifact)):
        writable_path(path)
    if logs is None and verbose:
        logs = Path(context.with_resource(TemporaryDirectory(prefix="gymgate-check-")))
    requests = _requests(context, logs)
    thresholds = Thresholds(**option_fields(context)[Thresholds])
    of_probes = requests[0].sections if context.params["probes"] else ("oracle", "probes")
    output = _Output(thresholds, of_probes, as_json=as_json, verbose=verbose)
    error = None
    if rows_only:
        results = _read_rows(requests, records, rows_files, output)
    else:
        results, error = _check(requests, records, jobs, output)
    if as_json:
        print_json(results)
    elif not rows_only:
        _print_summary(results)
    if artifact is not None and results:
        _write_artifact(artifact, requests[0], results[0], output)
    if error is not None:
        raise error
    if not as_json and len(results) == 1:
        name = shlex.quote(requests[0].environment.name)
        if results[0].verdict == "match":
            log_next(f"gymgate run {name} -b URL -m MODEL")
        elif (
            results[0].verdict == "failed"
            and results[0].evidence
            and not results[0].traceback
            and not verbose
        ):
            log_next(f"gymgate check {name} -v, for what its servers wrote")
    if output.unmet or (not rows_only and any(result.verdict in ("differs", "failed") for result in results)):
        context.exit(1)


def _refuse_misfits(context: click.Context) -> None:
    """Raise `ConfigError` for options that do not belong together."""
    values = context.params
    environments, sections, rows_files = values["environments"], values["sections"], values["rows_files"]
    has_model = values["urls"] is not None
    rows_only = values["rows_only"]
    if not environments and not values["everything"]:
        raise ConfigError("name environments, or give --all")
    if len(environments) != 1:
        of_one = {
            "--set": "settings",
            "--config": "config",
            "--artifact": "artifact",
            "--rows-file": "rows_files",
        }
        for flag, name in of_one.items():
            if values[name]:
                raise ConfigError(f"{flag} is for one environment; name exactly one")
    if not has_model and (values["rows"] or values["repeats"] > 1):
        flag = "-n" if values["rows"] else "-r"
        raise ConfigError(f"{flag} is for the rows of a model; give its endpoint with -b")
    if values["probes"] and (sections or values["records"] or has_model or rows_only):
        raise ConfigError("--probe shows single probes; leave --section, --record, --rows-only and -b out")
    if rows_only and has_model:
        raise ConfigError("--rows-only runs no row; leave -b out")
    if rows_only and sections:
        raise ConfigError("--rows-only measures one section; leave --section out")
    if sections and ("policy" in sections) != has_model:
        raise ConfigError("--section policy needs a model's endpoint (-b), and -b that section")
    if rows_files and not rows_only:
        raise ConfigError("--rows-file gives rows for --rows-only; give both")
    if rows_files and values["records"]:
        raise ConfigError("a record is of the packaged rows; leave out --record or --rows-file")
    for path in rows_files:
        if not path.is_file():
            raise ConfigError(f"no file of rows at {str(path)!r}")


def _requests(context: click.Context, logs: Path | None) -> list[CheckRequest]:
    """Return a request for each environment, after asking the endpoints. Raises `ConfigError` and `PolicyError`."""
    values, fields = context.params, option_fields(context)
    stack = stack_fields(context, values["environments"])
    if (sandbox := values["sandbox"]) is not None:
        # Checked here, because the verdict on each environment would be that it is blocked.
        refuse_sandbox(sandbox, open_catalog(values["gym"], progress=log).site)
    endpoint, policy = endpoint_fields(context), None
    if endpoint:
        policy = asyncio.run(
            endpoint_with_model(HTTPEndpoint(**endpoint), values["wait_for_policy"] or 0, log)
        ).model_copy(update={"api_key": None})  # a check's process reads it from its variable
    if not values["rows_only"]:
        stack["models"] = asyncio.run(
            ask_judges(stack.get("models", {}), values["wait_for_policy"] or 0, log)
        )
    is_measured = bool(
        any(values[name] for name in ("records", "artifact", "sections", "probes"))
        or policy
        or fields[Thresholds]
    )
    settings = {
        **fields[CheckRequest],
        "repeats": values["repeats"],
        "limits": fields[RolloutLimits],
        "policy": policy,
        "measure": is_measured,
        **_settings_of_probes({*values["probes"]}),
    }
    requests = []
    for config in _environments(context, stack["environments"]):
        own = {**stack, "environments": (config,)}
        if logs is not None:
            own["state_dir"] = str((logs / Path(config.name).stem).absolute())
        requests.append(CheckRequest.model_validate({**settings, "stack": own}))
    return requests


def _settings_of_probes(probes: AbstractSet[ProbeName]) -> dict[str, Any]:
    """Return the sections that single probes need: one flag is shown again in less than a minute."""
    if not probes:
        return {}
    needs = {"oracle": not probes <= WITHOUT_ANSWER, "probes": not probes <= OF_ORACLE}
    return {"sections": tuple(name for name, is_needed in needs.items() if is_needed), "replay": False}


def _environments(
    context: click.Context, configs: Sequence[EnvironmentConfig]
) -> Iterable[EnvironmentConfig]:
    """Return the environments to check, with their kind, so that a name means one environment among records. Paths stay."""
    values = context.params
    catalog = open_catalog(values["gym"], progress=log)
    if not values["everything"]:
        entries = [(config, catalog.find(config.name)) for config in configs]
        return [
            config if entry.kind == "config" else config.model_copy(update={"name": entry.known_as})
            for config, entry in entries
        ]
    directory = next((name for name, kind in KINDS.items() if kind == values["kind"]), PACKAGED_KINDS[0])
    every = catalog.agents() if directory == AGENT_KIND else catalog.environments()
    return environment_configs(context, [entry.known_as for entry in every if entry.kind == directory])


@dataclass
class _Output:
    """How results are shown, and what they lack."""

    thresholds: Thresholds
    of_probes: Sequence[str]
    """Sections that the probes that are run belong to."""
    as_json: bool
    verbose: bool
    unmet: list[str] = field(default_factory=list)
    """Thresholds that a result does not meet."""

    def add(self, result: CheckResult, show: Callable[[CheckResult], None]) -> None:
        """Show a result, and log the thresholds that it does not meet."""
        from gymgate.quality.record.findings import unmet_thresholds

        if not self.as_json:
            show(result)
        for line in unmet_thresholds(result, self.thresholds, self.of_probes):
            log(f"{result.environment}: threshold not met: {line}")
            self.unmet.append(line)


def _check(
    requests: Sequence[CheckRequest], records: Path | None, jobs: int, output: _Output
) -> tuple[list[CheckResult], GymgateError | None]:
    """Check environments and show the results, those of records that need no new check first.

    Return them all, and the error of the first environment that could not be checked.
    """
    from gymgate.quality import check_all
    from gymgate.quality.record.storage import finished_records, record_path, records_to_extend, save_record

    stored = finished_records(requests, records) if records is not None else {}
    if stored:
        log(
            f"not checked again: {len(stored)} of {len(requests)} environments; their records are in {records}"
        )
    sections, probes = requests[0].sections, requests[0].probes
    todo = [request for request in requests if request.name not in stored]
    to_extend = records_to_extend(todo, records) if records is not None and sections else {}
    if WITHOUT_RECORDINGS.issuperset(sections):
        todo = [
            request.model_copy(update={"replay": not probes and request.name not in to_extend})
            for request in todo
        ]

    def show(result: CheckResult) -> None:
        if probes and result.measured:
            _print_probes(result, probes)
        else:
            _print(result)
        for name in filter(result.missing.get, sections):
            echo(f"  not measured: {name} ({result.missing[name]})")

    def finished(request: CheckRequest, outcome: CheckResult | GymgateError) -> None:
        if isinstance(outcome, GymgateError):
            log(f"{request.name}: {outcome}")
            return
        result = outcome
        if (record := to_extend.get(request.name)) is not None:
            result = record.with_sections(sections, outcome)
        results[request.name] = result
        output.add(result, show)
        if request.stack.state_dir is not None:
            _show_logs(Path(request.stack.state_dir), verbose=output.verbose)
        if records is not None:
            save_record(path := record_path(records, result.name), result)
            log(f"{result.environment}: record in {path}")

    def progress(request: CheckRequest, message: str) -> None:
        log(f"{request.name}: {message}")

    results = dict(stored)
    for result in stored.values():
        output.add(result, show)
    outcomes = asyncio.run(check_all(todo, at_once=jobs, done=finished, progress=progress))
    errors = [outcome for outcome in outcomes if isinstance(outcome, GymgateError)]
    checked = [results[request.name] for request in requests if request.name in results]
    return checked, errors[0] if errors else None


def _read_rows(
    requests: Sequence[CheckRequest], records: Path | None, rows_files: Sequence[Path], output: _Output
) -> list[CheckResult]:
    """Show what each environment's rows show, and add it to its record in `records`; return the records."""
    from gymgate.quality.record.findings import row_findings
    from gymgate.quality.record.storage import load_record, record_path, save_record
    from gymgate.quality.rows_only import read_rows

    def show(result: CheckResult) -> None:
        echo(f"{result.environment}: {result.data}")
        for finding in row_findings(result):
            echo(f"  {finding}")

    catalog = open_catalog(requests[0].stack.runtime, progress=log)
    results = []
    for request in requests:
        environment = catalog.find(request.name, request.environment.config)
        name = f"{environment.kind}/{environment.name}-{catalog.version}"
        path = record_path(records, name) if records else None
        record = load_record(path) if path is not None else None
        results.append(result := read_rows(request, catalog, record, rows_files))
        if path is not None:
            save_record(path, result)
        output.add(result, show)
    return results


def _write_artifact(path: Path, request: CheckRequest, result: CheckResult, output: _Output) -> None:
    from gymgate.quality.record.artifact import artifact

    environment = open_catalog(request.stack.runtime, progress=log).find(
        request.name, request.environment.config
    )
    with replacing(path) as file:
        file.write(
            codec.dumps(artifact(result, environment, output.thresholds, output.unmet), indent=True) + b"\n"
        )


def _print_probes(result: CheckResult, probes: Sequence[ProbeName]) -> None:
    """Print what single probes show, with every answer of a flagged row."""
    from gymgate.quality.record.findings import problems

    echo(f"{result.environment}: {', '.join(probes)} [{result.seconds:g} s]")
    flags = [*problems(result)]
    for name in probes:
        if not (of_probe := [flag for flag in flags if flag.probe == name]):
            missing = result.probes.missing.get(name) if result.probes else None
            echo(f"  {name}: {f'not measured ({missing})' if missing else 'no flag'}")
        for flag in of_probe:
            echo(f"  {flag.label}: {flag}")
        rewards = result.probes.answers.get(name) if result.probes else None
        for row in (*rewards.flagged, *rewards.counter) if rewards else ():
            echo(f"    {row}")


def _print(result: CheckResult) -> None:
    from gymgate.quality.record.findings import problems

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
    for problem in problems(result) if result.measured else ():
        echo(f"  {problem.label}: {problem}" if problem.probe else f"  {problem}")
    if result.policy is not None:
        echo(f"  {result.policy}")


def _show_logs(directory: Path, *, verbose: bool) -> None:
    """Put the logs of a stack that has stopped into the directory itself, and print them."""
    paths = sorted(directory.glob("*/logs/*/*.log"))
    for path in paths:
        path.replace(directory / path.name)
    for stack in {path.parents[2] for path in paths}:
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
