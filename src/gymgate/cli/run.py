"""`gymgate run`: rollouts of NeMo Gym environments with a policy endpoint, without an SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
import orjson

from gymgate.cli import run_plan as plan
from gymgate.cli.collect_plan import policy_endpoint
from gymgate.cli.interrupts import INTERRUPTED, run_interruptibly
from gymgate.cli.options import (
    EndpointOptions,
    EnvironmentOptions,
    concurrency_option,
    data_option,
    endpoint_options,
    environment_options,
    gym_option,
    json_option,
    repeats_option,
    replay_file_option,
    rows_option,
)
from gymgate.cli.run_plan import Job
from gymgate.cli.run_report import Progress, Report, progress
from gymgate.config import (
    HTTPEndpoint,
    ReplayEndpoint,
    RolloutLimits,
    RuntimeConfig,
    StackConfig,
)
from gymgate.dataset import RowSource
from gymgate.errors import ConfigError, DataError
from gymgate.rollout import Rollout
from gymgate.rollout.result import failed_rollout

if TYPE_CHECKING:
    from gymgate.catalog import Environment
    from gymgate.stack import Stack


@dataclass(frozen=True)
class Run:
    """Everything that a run needs to know."""

    stack: StackConfig
    policy: HTTPEndpoint | ReplayEndpoint
    sources: Sequence[RowSource]
    repeats: int
    concurrency: int
    limits: RolloutLimits
    output: Path | None
    wait_for_policy_s: float | None = None
    """For the endpoint to answer before anything is started; `None`: it is not asked."""

    def jobs(self) -> Iterator[Job]:
        return plan.jobs(self.sources, self.repeats)

    def total(self) -> int:
        """Rollouts to run; `DataError` for a source without rows. May build the index of a large file."""
        for source in self.sources:
            source.refuse_empty()
        return sum(map(len, self.sources)) * self.repeats


@click.command("run")
@click.argument("environments", nargs=-1, required=True, metavar="ENV...")
@data_option
@rows_option
@repeats_option
@concurrency_option
@endpoint_options
@click.option("--replay", is_flag=True, help="Answer from recorded rollouts; the default without -b.")
@replay_file_option
@environment_options
@gym_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append each result to this JSONL file as it lands.",
)
@json_option
def command(as_json: bool, **options: Any) -> None:
    """Run rows of NeMo Gym environments with a policy, score them, and print a short table.

    Several ENVs run in one stack; with a JSONL file, each of its rows then names its agent (agent_ref). Exits
    with 1 if a rollout failed and with 130 if interrupted, after a table of what was done.
    """
    run = _prepare(**options)
    report = Report()
    interrupted, error = run_interruptibly(_run(run, report))
    if as_json:
        click.echo(orjson.dumps(report.as_dict(interrupted=interrupted, error=str(error) if error else None)))
    elif report.rollouts:
        report.print_table()
    if run.output is not None and report.rollouts:
        click.echo(f"results: {run.output}", err=True)
    if error is not None:
        raise error
    if interrupted:
        click.echo("interrupted", err=True)
    if code := INTERRUPTED if interrupted else int(report.failed > 0):
        raise click.exceptions.Exit(code)


def _prepare(
    environments: tuple[str, ...],
    data: str | None,
    rows: int | None,
    repeats: int,
    concurrency: int,
    endpoint: EndpointOptions,
    replay: bool,
    files: tuple[str, ...],
    served: EnvironmentOptions,
    gym: RuntimeConfig,
    output: Path | None,
) -> Run:
    """Check everything that can be checked before something is started; `ConfigError`, `DataError` if not."""
    replay, wait_s, base_url = replay or bool(files), endpoint.wait_for_policy, endpoint.urls
    if replay and base_url:
        raise ConfigError(f"--replay needs no endpoint, and -b names one: {base_url}")
    if endpoint.model and not base_url:
        raise ConfigError(f"model {endpoint.model!r} needs an endpoint: -b http://host:8000/v1")
    if wait_s is not None and not base_url:
        raise ConfigError("--wait-for-policy needs an endpoint: -b http://host:8000/v1")
    policy: HTTPEndpoint | ReplayEndpoint | None = None
    if base_url:
        policy = policy_endpoint(endpoint, say=_say)
    stack = plan.stack_config(environments, served, gym)
    found = _environments(stack)
    plan.require_judges(stack, found, replayed=policy is None)
    sources = plan.sources(data or "example", found, rows)
    if policy is None:
        policy = plan.replay(found, files)
        if all(source.environment for source in sources) and not files:
            sources = plan.only_recorded(sources, policy, _say)
    return Run(
        stack=stack,
        policy=policy,
        sources=sources,
        repeats=repeats,
        concurrency=concurrency,
        limits=served.limits,
        output=plan.checked(output) if output else None,
        wait_for_policy_s=wait_s,
    )


def _environments(stack: StackConfig) -> list[Environment]:
    from gymgate.catalog import Catalog
    from gymgate.runtime import ensure_runtime

    runtime = ensure_runtime(stack.runtime, progress=_say)
    catalog = Catalog(runtime.site, runtime.version)
    return [catalog.find(environment.name) for environment in stack.environments]


async def _run(run: Run, report: Report) -> None:
    from gymgate.gateway.backends.ready import wait_until_ready
    from gymgate.stack import acquire

    if run.wait_for_policy_s is not None and isinstance(run.policy, HTTPEndpoint):
        await wait_until_ready(run.policy, run.wait_for_policy_s, _say)
    total = await asyncio.to_thread(run.total)
    async with acquire(run.stack, progress=_say) as stack:
        with _appending(run.output) as write, progress(total) as show:
            report.start()
            await _run_all(stack, run, report, write, show)


async def _run_all(
    stack: Stack, run: Run, report: Report, write: Callable[[Job, Rollout], None], show: Progress
) -> None:
    todo = run.jobs()

    async def work() -> None:
        for job in todo:
            rollout = await _rollout(stack, run, job)
            write(job, rollout)
            report.count(rollout)
            show(report)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(run.concurrency):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors


async def _rollout(stack: Stack, run: Run, job: Job) -> Rollout:
    """A row that cannot be read or run fails alone."""
    if isinstance(job.row, DataError):
        return failed_rollout(job.row, environment=job.environment or "?", agent="")
    try:
        return await stack.run(
            job.row.data,
            policy=run.policy,
            environment=job.environment,
            limits=run.limits,
            record_bodies=run.output is not None,
        )
    except (ConfigError, DataError) as error:
        data = DataError(f"{job.row.source}:{job.row.line}: {error}", path=job.row.source, line=job.row.line)
        return failed_rollout(data, environment=job.environment or "?", agent=job.row.agent or "")


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


@contextmanager
def _appending(path: Path | None) -> Iterator[Callable[[Job, Rollout], None]]:
    """A function that appends a result to the file, whole lines only."""
    if path is None:
        yield lambda job, rollout: None
        return
    with path.open("ab") as file:
        yield lambda job, rollout: _append(file, job, rollout)


def _append(file: IO[bytes], job: Job, rollout: Rollout) -> None:
    if isinstance(job.row, DataError):
        key, source = None, job.row.path
    else:
        key, source = job.row.key, job.row.source
    origin = {"key": key, "source": source, "line": job.row.line, "repeat": job.repeat}
    line = orjson.dumps({"row": origin, **rollout.model_dump(mode="json")}, option=orjson.OPT_APPEND_NEWLINE)
    try:
        file.write(line)
        file.flush()
    except OSError as error:
        raise DataError(f"cannot write results to {file.name}: {error.strerror}", path=file.name) from error


def _say(message: str) -> None:
    click.echo(message, err=True)
