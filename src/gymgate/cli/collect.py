"""`gymgate collect`: many rollouts to a directory, resumed where they were left."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import click

from gymgate.cli.collecting import make_collection
from gymgate.cli.interrupts import INTERRUPTED, run_interruptibly
from gymgate.cli.metrics_tables import print_results
from gymgate.cli.options import (
    Seconds,
    concurrency_option,
    data_option,
    endpoint_options,
    environment_options,
    gym_option,
    json_option,
    k_option,
    repeats_option,
    replay_file_option,
    rows_option,
    wide_option,
)
from gymgate.cli.output import Log, print_json
from gymgate.cli.progress import OTHER_OUTCOMES, Show, showing_progress
from gymgate.collection.aggregate import read_runs
from gymgate.collection.metrics import notes_on_tasks, parse_ks, summary_rows
from gymgate.collection.pace import Pace, parse_budgets
from gymgate.collection.plan import WHOLE, parse_seeds, parse_shard
from gymgate.collection.run import Collection
from gymgate.collection.store import FAILURES
from gymgate.config import RayCluster
from gymgate.errors import ConfigError
from gymgate.stack.ray_nodes import require_ray

FAILED = 1
EXAMPLE_LENGTH = 200
"""Characters of a failure's message that are shown."""
UNFINISHED = 75
"""Drained before the end: the same command goes on (`EX_TEMPFAIL`)."""


@click.command("collect")
@click.argument("arguments", nargs=-1, required=True, metavar="ENV...|FILE.jsonl")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Directory of the run. An unfinished run there is resumed.",
)
@click.option(
    "--env",
    "named",
    multiple=True,
    metavar="ENV",
    help="Environment of FILE's rows. Repeatable. [found by the agents that they name]",
)
@data_option
@rows_option
@repeats_option
@click.option("--seeds", metavar="N|LIST", help="Seeds sent to the policy: 4 is 0-3; or a list, 3,5,7-9.")
@click.option("--shard", metavar="I/N", help="Run only shard I of N, in OUTPUT/shard-I-of-N.")
@concurrency_option
@endpoint_options
@replay_file_option
@environment_options
@click.option(
    "--retries",
    multiple=True,
    metavar="[CLASS=]N",
    help="Retries of a failed rollout. Repeatable. [infrastructure=3 policy=3 timeout=1 environment=1 data=0]",
)
@click.option("--rerun-failed", is_flag=True, help="Run rollouts again that failed for good.")
@click.option(
    "--stop-after-failures",
    type=click.IntRange(0),
    metavar="N",
    help="Stop when N rollouts in a row failed for good; 0: never. [50, or twice -c]",
)
@click.option(
    "--stop-starting-after",
    "budget",
    type=Seconds(0, min_open=True),
    metavar="SECONDS",
    help="After this time, finish the rollouts under way and exit with 75. SIGUSR1 does the same.",
)
@click.option(
    "--stall-warning",
    type=Seconds(0, min_open=True),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Warn when no rollout has finished for SECONDS.",
)
@click.option(
    "--sync-every",
    type=Seconds(0),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Sync results to disk every SECONDS; 0: after each rollout.",
)
@click.option("--bodies", is_flag=True, help="Keep each model call's request and response.")
@gym_option
@click.option("--ray", metavar="ADDRESS", help="Run on a Ray cluster, a stack per node: auto, or HOST:PORT.")
@click.option(
    "--cpus-per-stack",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="With --ray: reserve N CPUs for each stack, and run as many on a node as fit.",
)
@k_option
@wide_option
@json_option
def command(
    as_json: bool,
    budget: float | None,
    output: Path,
    concurrency: int,
    seeds: str | None,
    shard: str | None,
    retries: tuple[str, ...],
    stop_after_failures: int | None,
    stall_warning: float,
    sync_every: float,
    bodies: bool,
    ks: str | None,
    wide: bool,
    ray: str | None,
    cpus_per_stack: float | None,
    **options: Any,
) -> None:
    """Collect rollouts into a directory, resumed where they stopped.

    The rows are ENV's, or those of FILE. Each rollout is appended as soon as it has finished. The same command again,
    after a kill or a crash, runs what is missing. Ends with the run's metrics. Exits with 1 if rollouts failed for good,
    75 if it was drained before the end, 130 if interrupted.
    """
    if output.exists() and not output.is_dir():
        raise ConfigError(f"-o {output} is a file; a run needs a directory")
    if cpus_per_stack is not None and ray is None:
        raise ConfigError("--cpus-per-stack needs --ray ADDRESS")
    if ray is not None:
        require_ray()
    chosen = parse_ks(ks) if ks else None
    wait_s = options["endpoint"].wait_for_policy
    with showing_progress() as (show, log), _drained_before_the_run(log):
        run = make_collection(
            **options,
            seeds=parse_seeds(seeds) if seeds is not None else None,
            shard=parse_shard(shard) if shard is not None else WHOLE,
            output=output,
            pace=Pace(concurrency, parse_budgets(retries), sync_every, stall_warning, stop_after_failures),
            record_bodies=bodies,
            ray=RayCluster(ray, cpus_per_stack=cpus_per_stack) if ray is not None else None,
            # Ray's nodes may reach an endpoint that this machine does not.
            wait_for_policy_s=0.0 if wait_s is None and ray is None else wait_s,
            log=log,
        )
        interrupted, error = run_interruptibly(_run_drainably(run, show, budget))
    if run.progress.total:
        _close(run, log, ks=chosen, as_json=as_json, wide=wide)
    if error is not None:
        raise error
    progress = run.progress
    if interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    if run.draining and progress.left:
        raise click.exceptions.Exit(UNFINISHED)
    if progress.failed or progress.given_up_before or run.plan.invalid:
        raise click.exceptions.Exit(FAILED)


@contextlib.contextmanager
def _drained_before_the_run(log: Log) -> Iterator[None]:
    """End with `UNFINISHED` at a SIGUSR1 that comes before the run handles it, such as in the wait for the policy."""

    def end(*_: object) -> None:
        log("SIGUSR1: nothing was started")
        raise click.exceptions.Exit(UNFINISHED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGUSR1, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


async def _run_drainably(run: Collection, show: Show, budget: float | None) -> None:
    """Drain the run at SIGUSR1 and at the end of the budget, in seconds."""

    def drain(why: str) -> None:
        under_way = len(run.collector.in_flight) if run.collector else 0
        run.log(f"{why}: starting nothing more, {under_way} rollouts are under way")
        run.drain()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, drain, "SIGUSR1")
    timer = loop.call_later(budget, drain, f"{budget:g} s are over") if budget else None
    try:
        await run.run(on_change=show, on_ready=show)
    finally:
        if timer is not None:
            timer.cancel()


def _close(run: Collection, log: Log, *, ks: Sequence[int] | None, as_json: bool, wide: bool) -> None:
    """Print the closing counts and the run's metrics, as a table or as JSON, and what to do next.

    The metrics are the run's, of this process and of those before it.
    """
    progress, directory = run.progress, run.directory
    assert directory is not None
    collected = read_runs([directory])
    metrics = summary_rows(collected, ks)
    overall = metrics[-1] if metrics else {}
    for note in () if ks else notes_on_tasks(collected):
        log(note)
    if as_json:
        print_json(
            {
                "output": str(directory),
                "total": progress.total,
                "resumed": progress.resumed,
                "finished": progress.finished,
                "failed": progress.failed + progress.given_up_before,
                "left": progress.left,
                "invalid_rows": len(run.plan.invalid),
                "mean_reward": overall.get("mean_reward"),
                "counted": overall.get("scored", 0),
                **{str(name): overall.get(name, 0) for name in OTHER_OUTCOMES},
                "failed_attempts": dict(progress.failures),
                "replayed": run.replayed,
                "environments": metrics,
            }
        )
        return
    left = f", {progress.left} left" if progress.left else ""
    log(f"{directory}: {progress.done} of {progress.total} rollouts{left}")
    for reason, count in progress.failures.most_common(5):
        example = shorten(progress.examples[reason], EXAMPLE_LENGTH, placeholder=" ...")
        log(f"{count} x {reason}, such as: {example} (see {directory}/{FAILURES})")
    if metrics:
        print_results(metrics, replayed=run.replayed, ks=ks, wide=wide)
        path = shlex.quote(str(run.output))
        log(
            f"next: gymgate report {path}  |  gymgate aggregate {path}  |  gymgate export {path} --to FORM -o FILE"
        )
    if progress.left:
        log("run the same command again to run the rest")
