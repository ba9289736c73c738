"""What commands that run rollouts share: options, the way to the run's end, and what they print of it."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from gymgate.cli.interrupts import INTERRUPTED, run_interruptibly
from gymgate.cli.metrics_tables import accepted_answers, print_costs, print_results
from gymgate.cli.options import (
    ENVIRONMENT_OPTIONS,
    FiniteRange,
    concurrency_option,
    failed_as_option,
    field_option,
    gym_option,
    json_option,
    k_option,
    log_to_option,
    option,
    parsed,
    wide_option,
)
from gymgate.cli.output import Log, explained, log, log_next, print_json
from gymgate.core.config import RolloutLimits
from gymgate.core.errors import GymgateError, StackStartError
from gymgate.results.tracking import RunTracking
from gymgate.runs.collected.progress_display import Show, showing_progress
from gymgate.runs.collected.run import Collection, OnRollout
from gymgate.runs.counted.account import notes_on
from gymgate.runs.counted.costs import TokenUsage
from gymgate.runs.counted.metrics import summary_rows
from gymgate.runs.described.pace import DEFAULT_BUDGETS, Pace, parse_budgets
from gymgate.runs.described.settings import is_example
from gymgate.runs.described.spec import RunSpec
from gymgate.runs.stored.layout import FAILURES
from gymgate.runs.stored.record import CollectedRollout

FAILED = 1
UNFINISHED = 75
"""Drained before the end: the same command continues (`EX_TEMPFAIL`)."""
CONDUCT_OPTIONS = (
    concurrency_option,
    *ENVIRONMENT_OPTIONS,
    gym_option,
    field_option(
        "Limits",
        Pace,
        "budgets",
        "--retries",
        multiple=True,
        default=(),
        show_default=False,
        callback=parsed(parse_budgets),
        metavar="[CLASS=]N",
        help="With -o DIR: retries of a failed rollout by the class of its error. Repeatable. "
        f"[{' '.join(f'{kind}={count}' for kind, count in DEFAULT_BUDGETS.items())}]",
    ),
    field_option("Limits", RolloutLimits, "context_overflow", "--context-overflow"),
    field_option("Limits", Pace, "failures_in_a_row", "--stop-after-failures"),
    option(
        "Limits",
        "--stop-starting-after",
        "budget",
        type=FiniteRange(0, min_open=True),
        metavar="SECONDS",
        help="After this time, finish the rollouts under way and exit with 75. SIGUSR1 does the same.",
    ),
    field_option("Limits", Pace, "stall_s", "--stall-warning"),
    json_option,
    k_option,
    wide_option,
    option(
        "Output", "--rerun-failed", is_flag=True, help="With -o DIR: retry rollouts that failed permanently."
    ),
    field_option("Output", RunSpec, "record_bodies", "--bodies"),
    field_option("Output", Pace, "fsync_s", "--sync-every"),
    log_to_option,
    failed_as_option,
)
"""Options of how a run is carried out and shown."""


@dataclass(frozen=True)
class RunOutput:
    """What `gymgate run --json` prints."""

    output: str | None
    """The directory of the run."""
    replayed: bool
    """Whether recorded rollouts answered for the policy."""
    total: int
    """Planned rollouts: `resumed`, `finished`, `failed` and `left`."""
    resumed: int
    """Rollouts that earlier runs in the directory left finished or failed."""
    finished: int
    """Rollouts that finished now."""
    failed: int
    """Rollouts that failed permanently now."""
    left: int
    invalid_rows: int
    """Rows that could not be read and were left out."""
    seconds: float
    """Time from the start of the first rollout to the end of the last one."""
    failed_attempts: int
    """Attempts that failed now, those that were retried included."""
    reasons: Mapping[str, int]
    """Why rollouts failed or were masked now, with their numbers."""
    interrupted: bool
    error: str | None
    """What ended the run early."""
    environments: Mapping[str, Mapping[str, Any]]
    """Metrics by environment, over the whole run in the directory. `rollouts` are all of them, failed ones included."""
    overall: Mapping[str, Any] | None
    """The same metrics over all environments; `None` before the first rollout."""
    usage: Sequence[TokenUsage]
    """Tokens of the whole run in the directory, by environment and model server, with their cost if there is a price."""


@contextlib.contextmanager
def showing_run() -> Iterator[tuple[Show, Log]]:
    """Show the progress of a run, from before it is made."""
    with showing_progress() as (show, progress_log):

        def log(message: str) -> None:
            progress_log(explained(message))

        with _drained_before_the_run(log):
            yield show, log


class RunEnd(NamedTuple):
    """How a run ended."""

    interrupted: bool
    error: GymgateError | None
    """What ended it early."""


def conduct(
    run: Collection,
    show: Show,
    budget: float | None,
    *,
    log_to: str | None = None,
    show_rollout: Callable[[CollectedRollout], None] | None = None,
    failed_as: float | None = None,
) -> RunEnd:
    """Run it to its end, or until it is interrupted or `budget` seconds are over; log it with the package `log_to`.

    `show_rollout` gets each rollout that finished or failed permanently; those that failed count with the reward `failed_as`.
    """
    run.progress.tasks.count_failed_as(failed_as)
    tracking = RunTracking(log_to, run) if log_to else None

    def see(rollout: CollectedRollout) -> None:
        if show_rollout is not None:
            show_rollout(rollout)
        if tracking is not None:
            tracking.add(rollout)

    async def work() -> None:
        async with tracking or contextlib.nullcontext():
            await _run_drainably(run, show, see, budget)

    return RunEnd(*run_interruptibly(work()))


def finish(
    run: Collection,
    end: RunEnd,
    output: Path | None,
    *,
    ks: Sequence[int] | None,
    as_json: bool,
    wide: bool,
    base: Path | None = None,
    note: str = "",
) -> None:
    """Print what a run came to, and a note on it; `base` is the run to compare it with, if there is one.

    Raises what ended it early, and `Exit` unless every rollout finished.
    """
    interrupted, error = end
    tasks = run.progress.tasks
    summary = summary_rows(tasks, ks)
    total = summary[-1] if len(summary) > 1 else None  # an environment may be called `all` too
    rows = [
        {**row, "rollouts_per_s": run.progress.mean_rate(None if row is total else row["environment"])}
        for row in summary
    ]
    if as_json:
        usage = tasks.usage.rows(run.progress.prices)
        print_json(run_output(run, rows, usage, output, interrupted=interrupted, error=error))
    else:
        if rows:
            print_results(rows, replayed=run.replayed, ks=ks, wide=wide, is_example=is_example(run.names))
        if run.progress.prices:
            print_costs(tasks.usage.rows(run.progress.prices), wide=wide)
        for line in (*notes_on(tasks), *accepted_answers(rows, run.stack.runtime.version)):
            log(line)
        if note:
            log(note)
        if output is not None and run.progress.total:
            _log_output(run, output, base)
        elif rows:
            mine = "add -b URL -m MODEL for your model" if run.replayed else ""
            keep = "add -o DIR to keep the rollouts, for gymgate report and gymgate compare"
            log_next(*_checks(run), mine, keep, _lingering(run))
    if error is not None:
        raise _with_check(error, run)
    if interrupted:
        log("interrupted")
    if code := _exit_code(run, interrupted=interrupted):
        raise click.exceptions.Exit(code)


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


async def _run_drainably(run: Collection, show: Show, on_rollout: OnRollout, budget: float | None) -> None:
    """Drain the run at SIGUSR1 and at the end of the budget, in seconds."""

    def drain(why: str) -> None:
        run.log(f"{why}: starting nothing more, {len(run.in_flight)} rollouts are under way")
        run.drain()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, drain, "SIGUSR1")
    timer = loop.call_later(budget, drain, f"{budget:g} s are over") if budget else None
    try:
        await run.run(on_rollout=on_rollout, on_change=show, on_ready=show)
    finally:
        if timer is not None:
            timer.cancel()


def run_output(
    run: Collection,
    rows: Sequence[Mapping[str, Any]],
    usage: Sequence[TokenUsage],
    output: Path | None,
    *,
    interrupted: bool,
    error: GymgateError | None,
) -> RunOutput:
    """Return a run's end as `--json` prints it; `rows` and `usage` are those of its tables."""
    progress = run.progress
    return RunOutput(
        output=str(run.directory) if run.directory else None,
        replayed=run.replayed,
        total=progress.total,
        resumed=progress.resumed,
        finished=progress.finished,
        failed=progress.failed,
        left=progress.left,
        invalid_rows=len(run.plan.invalid),
        seconds=progress.last_finished - progress.started,
        failed_attempts=progress.attempts_failed,
        reasons=progress.tasks.counts.causes,
        interrupted=interrupted,
        error=str(error) if error else None,
        environments={row["environment"]: row for row in (rows if len(rows) == 1 else rows[:-1])},
        overall=rows[-1] if rows else None,
        usage=usage,
    )


def _log_output(run: Collection, output: Path, base: Path | None) -> None:
    """Log where the rollouts are and what to do next."""
    progress = run.progress
    left = f", {progress.left} left" if progress.left else ""
    older = 0 if progress.left else progress.tasks.counts.rollouts - progress.done
    also = f"; {older} older ones, which this command did not ask for, are in the table too" * (older > 0)
    log(f"{run.directory}: {progress.done} of {progress.total} rollouts{left}{also}")
    if progress.attempts_failed:
        log(f"{progress.attempts_failed} failed attempts: {run.directory}/{FAILURES}")
    path = shlex.quote(str(output))
    log_next(
        *_checks(run),
        "the same command runs the rest" if progress.left else "",
        "" if base is None else f"gymgate compare {shlex.quote(str(base))} {path}",
        f"gymgate report {path}",
        f"gymgate aggregate {path}",
        f"gymgate export {path} --to FORM -o FILE",
        _lingering(run),
    )


def _lingering(run: Collection) -> str:
    """What to do about servers that `--linger` keeps."""
    seconds = run.stack.linger_s
    return f"gymgate stop ends the servers, which else stay for {seconds:g} s" if seconds else ""


def _checks(run: Collection) -> Iterator[str]:
    """Yield the command that names file and line, for each environment whose servers failed a rollout.

    A directory may have another name than the environment in it, as a copy has.
    """
    broken = run.progress.tasks.broken_environments
    environments = run.stack.environments
    for environment in environments if broken else ():
        if len(environments) == 1 or not broken.isdisjoint((environment.name, Path(environment.name).stem)):
            yield f"gymgate check {shlex.quote(environment.name)}, for file and line of an exception"


def _with_check(error: GymgateError, run: Collection) -> GymgateError:
    """Return an error; that of a server that ended while starting also has the command that shows what it wrote."""
    if not isinstance(error, StackStartError) or error.exit_status is None or not error.log_tail:
        return error
    environments = run.stack.environments
    name = shlex.quote(environments[0].name) if len(environments) == 1 else "ENV"
    shown = f"{error.message}; gymgate check {name} -v shows what it wrote"
    return StackStartError(shown, **{field: getattr(error, field) for field in error.fields})


def _exit_code(run: Collection, *, interrupted: bool) -> int:
    progress = run.progress
    if interrupted:
        return INTERRUPTED
    if run.draining and progress.left:
        return UNFINISHED
    return FAILED if progress.failed or progress.given_up_before or run.plan.invalid else 0
