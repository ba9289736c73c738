"""`gymgate collect`: many rollouts to a directory, resumed where they were left."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gymgate.cli import collect_plan, run_plan
from gymgate.cli.collect_progress import close, progress
from gymgate.cli.interrupts import INTERRUPTED, run_interruptibly
from gymgate.cli.options import (
    EndpointOptions,
    EnvironmentOptions,
    Seconds,
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
from gymgate.collection.plan import WHOLE, Plan, parse_seeds, parse_shard
from gymgate.collection.retries import parse_budgets
from gymgate.collection.run import Collection
from gymgate.collection.runner import Pace
from gymgate.collection.tally import Tally
from gymgate.config import HTTPEndpoint, ReplayEndpoint, RuntimeConfig
from gymgate.errors import ConfigError

FAILED = 1
UNFINISHED = 75
"""Drained before the end: the same command goes on (`EX_TEMPFAIL`)."""


@click.command("collect")
@click.argument("arguments", nargs=-1, required=True, metavar="ENV...|FILE.jsonl")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Directory of the run; resumed if it is there.",
)
@click.option(
    "--env",
    "named",
    multiple=True,
    metavar="ENV",
    help="Environment of FILE's rows. [the home of the agents they name]",
)
@data_option
@rows_option
@repeats_option
@click.option("--seeds", metavar="N|LIST", help="Seeds sent to the policy: 4 is 0-3; or a list, 3,5,7-9.")
@click.option("--shard", metavar="I/N", help="Only part I of N, to OUTPUT/shard-I-of-N.")
@concurrency_option
@endpoint_options
@replay_file_option
@environment_options
@click.option(
    "--retries",
    multiple=True,
    metavar="[CLASS=]N",
    help="Further attempts of a failed rollout. [infrastructure=3 policy=3 timeout=1 environment=1 data=0]",
)
@click.option("--rerun-failed", is_flag=True, help="Try rollouts again that were given up.")
@click.option(
    "--stop-after-failures",
    type=click.IntRange(0),
    metavar="N",
    help="Stop when N rollouts were given up in a row; 0: never. [50, or twice -c]",
)
@click.option(
    "--stop-starting-after",
    "budget",
    type=Seconds(0, min_open=True),
    metavar="SECONDS",
    help="Start nothing more after this time, finish what runs, exit with 75. SIGUSR1 does the same.",
)
@click.option(
    "--stall-warning",
    type=Seconds(0, min_open=True),
    default=120.0,
    show_default=True,
    help="Seconds without a finished rollout until a warning.",
)
@click.option(
    "--sync-every",
    type=Seconds(0),
    default=1.0,
    show_default=True,
    help="Seconds between syncs to disk; 0: after each rollout.",
)
@click.option("--bodies", is_flag=True, help="Keep each model call's request and response.")
@gym_option
@click.option("--ray", metavar="ADDRESS", help="Run on a Ray cluster, a stack per node: auto, or HOST:PORT.")
@json_option
def command(as_json: bool, budget: float | None, **options: Any) -> None:
    """Collect rollouts of ENV's rows, or of FILE's, into a directory.

    Each is appended as soon as it has finished. The same command again, after a kill or a crash, runs what is
    missing. Exits with 1 if rollouts failed for good, 75 if it was drained before the end, 130 if interrupted.
    """
    with progress() as (show, say):
        run = _prepare(say=say, **options)
        code, error = _execute(run, show, budget)
    if run.tally.total:
        close(run, as_json, say)
    if error is not None:
        raise error
    if code := code or (FAILED if run.tally.failed or _given_up(run) or run.plan.invalid else 0):
        raise click.exceptions.Exit(code)


def _prepare(
    arguments: tuple[str, ...],
    output: Path,
    named: tuple[str, ...],
    data: str | None,
    rows: int | None,
    repeats: int,
    seeds: str | None,
    shard: str | None,
    concurrency: int,
    endpoint: EndpointOptions,
    files: tuple[str, ...],
    served: EnvironmentOptions,
    retries: tuple[str, ...],
    rerun_failed: bool,
    stop_after_failures: int | None,
    stall_warning: float,
    sync_every: float,
    bodies: bool,
    gym: RuntimeConfig,
    ray: str | None,
    say: Callable[[str], None],
) -> Collection:
    """Check everything that can be checked before something is started; `ConfigError`, `DataError` if not."""
    part = parse_shard(shard) if shard else WHOLE
    wanted_seeds = parse_seeds(seeds) if seeds else None
    pace = Pace(concurrency, parse_budgets(retries), sync_every, stall_warning, stop_after_failures)
    collect_plan.checked_output(output)
    _refuse_idle_options(endpoint, files)
    policy: HTTPEndpoint | ReplayEndpoint | None = None
    if endpoint.urls:
        policy = collect_plan.policy_endpoint(endpoint, say=say)
    environments, source = collect_plan.split_arguments(arguments, named, data)
    if not environments:
        environments = collect_plan.environments_of_rows(source, gym, say)
    stack = run_plan.stack_config(environments, served, gym)
    catalog = collect_plan.open_catalog(gym, say)
    found = [catalog.find(environment.name) for environment in stack.environments]
    run_plan.require_judges(stack, found, replayed=policy is None)
    sources = run_plan.sources(source, found, rows)
    if policy is None:
        policy = run_plan.replay(found, files)
        if not files and all(each.environment for each in sources):
            sources = run_plan.only_recorded(sources, policy, say)
    return Collection(
        stack=stack,
        policy=policy,
        plan=Plan(sources, repeats=repeats, seeds=wanted_seeds, shard=part),
        names=[source],
        output=output,
        limits=served.limits,
        pace=pace,
        rerun_failed=rerun_failed,
        record_bodies=bodies,
        ray=ray,
        # Ray's nodes may reach an endpoint that this machine does not.
        wait_for_policy_s=0.0
        if endpoint.wait_for_policy is None and ray is None
        else endpoint.wait_for_policy,
        say=say,
    )


def _refuse_idle_options(endpoint: EndpointOptions, files: tuple[str, ...]) -> None:
    """Options that belong to an endpoint, without one; and the other way round."""
    given = {
        "-m": endpoint.model,
        "--sampling": endpoint.sampling,
        "--api-key-var": endpoint.api_key_var,
        "--wait-for-policy": endpoint.wait_for_policy,
    }
    if not endpoint.urls and (idle := [name for name, value in given.items() if value not in (None, ())]):
        raise ConfigError(
            f"{' and '.join(idle)}: there is no endpoint for it; name one: -b http://host:8000/v1"
        )
    if endpoint.urls and files:
        raise ConfigError(f"--replay-file needs no endpoint, and -b names one: {endpoint.urls}")


def _execute(
    run: Collection, show: Callable[[Tally], None], budget: float | None
) -> tuple[int, Exception | None]:
    """Run it; the exit code that a signal or the time's end asks for, and the fault that ended it early."""
    interrupted, error = run_interruptibly(_drainable(run, show, budget))
    if interrupted or error is not None:
        return INTERRUPTED if interrupted else FAILED, error
    drained = run.draining and run.tally.left > 0
    return (UNFINISHED if drained else 0), None


async def _drainable(run: Collection, show: Callable[[Tally], None], budget: float | None) -> None:
    """SIGUSR1 drains, and so does the end of the budget. What has finished is on disk."""

    def drain(why: str) -> None:
        run.say(f"{why}: starting nothing more, {len(run.collector.in_flight) if run.collector else 0} run")
        run.drain()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, drain, "SIGUSR1")
    timer = loop.call_later(budget, drain, f"{budget:g} s are over") if budget else None
    try:
        await run.run(on_change=show, on_ready=show)
    finally:
        if timer is not None:
            timer.cancel()


def _given_up(run: Collection) -> bool:
    return run.tally.given_up_before > 0
