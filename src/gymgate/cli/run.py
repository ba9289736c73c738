"""`gymgate run`: rollouts of NeMo Gym environments with a policy endpoint, without an SDK."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gymgate import codec
from gymgate.cli.collecting import make_collection
from gymgate.cli.interrupts import INTERRUPTED, run_interruptibly
from gymgate.cli.metrics_tables import BESIDE_THE_MEAN, all_causes, print_outcomes
from gymgate.cli.options import (
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
from gymgate.cli.output import log, print_json
from gymgate.cli.progress import showing_progress
from gymgate.collection.collector import OnRollout
from gymgate.collection.pace import Pace
from gymgate.collection.plan import NO_KEY
from gymgate.collection.progress import EnvironmentMetrics, RunProgress
from gymgate.collection.record import CollectedRollout
from gymgate.collection.run import Collection
from gymgate.errors import DataError
from gymgate.rollout import Rollout


@click.command("run")
@click.argument("arguments", nargs=-1, required=True, metavar="ENV...|FILE.jsonl")
@data_option
@rows_option
@repeats_option
@concurrency_option
@endpoint_options
@replay_file_option
@environment_options
@gym_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Append each result to this JSONL file as soon as it is there.",
)
@json_option
def command(as_json: bool, concurrency: int, output: Path | None, **options: Any) -> None:
    """Run rows with a policy, score them, and print a table.

    Several ENVs run in one stack; each row of a FILE, or of --data FILE with several ENVs, then names its agent
    (agent_ref). Failed rollouts are not retried. Exits with 1 if a rollout failed and with 130 if interrupted, after a
    table of what was done.
    """
    with showing_progress() as (show, progress_log):
        run = make_collection(
            **options,
            keep_invalid=True,
            pace=Pace(concurrency, budgets={}, failures_in_a_row=0),
            record_bodies=output is not None,
            wait_for_policy_s=options["endpoint"].wait_for_policy,
            log=progress_log,
        )
        with _results(output) as append:
            interrupted, error = run_interruptibly(run.run(on_rollout=append, on_change=show))
    progress = run.progress
    rates = {name: _rate(each, progress) for name, each in progress.environments.items()}
    if as_json:
        print_json(as_dict(run, rates, interrupted=interrupted, error=str(error) if error else None))
    elif progress.environments:
        print_outcomes(progress.environments, rates, replayed=run.replayed)
    if output is not None and progress.environments:
        log(f"results: {output}")
    if error is not None:
        raise error
    if interrupted:
        log("interrupted")
    if code := INTERRUPTED if interrupted else int(progress.failed > 0):
        raise click.exceptions.Exit(code)


@contextmanager
def _results(path: Path | None) -> Iterator[OnRollout | None]:
    """Yield a function that appends a rollout to the file, whole lines only.

    Raises `DataError` if the file cannot be written, also before anything is started.
    """
    if path is None:
        yield None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise _not_written(path, error) from error

    async def append(rollout: CollectedRollout) -> None:
        key = None if rollout.row_key == NO_KEY else rollout.row_key
        row = {"key": key, "source": rollout.source, "line": rollout.line, "repeat": rollout.repeat}
        value = {"row": row, **rollout.model_dump(mode="json", include=set(Rollout.model_fields))}
        try:
            file.write(codec.dumps(value) + b"\n")
            file.flush()
        except OSError as error:
            raise _not_written(path, error) from error

    with file:
        yield append


def _not_written(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot write results to {path}: {error.strerror}", path=str(path))


def _rate(metrics: EnvironmentMetrics, progress: RunProgress) -> float | None:
    seconds = progress.last_finished - progress.started
    return metrics.rollouts / seconds if seconds > 0 else None


def as_dict(
    run: Collection, rates: dict[str, float | None], *, interrupted: bool, error: str | None
) -> dict[str, Any]:
    """The closing table as JSON values."""
    environments = {
        name: {
            "rollouts": each.rollouts,
            "ok": each.ok,
            **{reason: each.outcomes[reason] for reason in BESIDE_THE_MEAN},
            "mean_reward": each.mean_reward,
            "rollouts_per_s": rates[name],
        }
        for name, each in sorted(run.progress.environments.items())
    }
    return {
        "environments": environments,
        "reasons": dict(all_causes(run.progress.environments)),
        "seconds": run.progress.last_finished - run.progress.started,
        "replayed": run.replayed,
        "interrupted": interrupted,
        "error": error,
    }
