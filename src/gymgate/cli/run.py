"""`gymgate run`: rollouts of NeMo Gym environments with a policy endpoint, without an SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gymgate.cli.collecting import make_collection
from gymgate.cli.interrupts import INTERRUPTED, run_interruptibly
from gymgate.cli.metrics_tables import all_causes, print_causes, print_results
from gymgate.cli.options import (
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
from gymgate.cli.output import log, print_json
from gymgate.cli.progress import showing_progress
from gymgate.collection.metrics import parse_ks, summary_rows
from gymgate.collection.pace import Pace
from gymgate.collection.progress import RunProgress
from gymgate.collection.record import CollectedRollout, to_line
from gymgate.collection.run import Collection
from gymgate.collection.tasks import CollectedTasks
from gymgate.errors import DataError


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
@k_option
@wide_option
@json_option
def command(
    as_json: bool, concurrency: int, output: Path | None, ks: str | None, wide: bool, **options: Any
) -> None:
    """Run rows with a policy, score them, and print a table.

    Several ENVs run in one stack; each row of a FILE, or of --data FILE with several ENVs, then names its agent
    (agent_ref). Failed rollouts are not retried. Exits with 1 if a rollout failed and with 130 if interrupted, after a
    table of what was done.
    """
    chosen = parse_ks(ks) if ks else None
    tasks = CollectedTasks()
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

            async def add(rollout: CollectedRollout) -> None:
                tasks.add_rollout(rollout)
                append(rollout)

            interrupted, error = run_interruptibly(run.run(on_rollout=add, on_change=show))
    progress = run.progress
    rows = [
        {**row, "rollouts_per_s": _rate(row["rollouts"], progress)} for row in summary_rows(tasks, chosen)
    ]
    if as_json:
        print_json(as_dict(run, rows, interrupted=interrupted, error=str(error) if error else None))
    elif rows:
        print_results(rows, replayed=run.replayed, ks=chosen, wide=wide)
        print_causes(progress.environments)
    if output is not None and progress.environments:
        log(f"results: {output}")
    if error is not None:
        raise error
    if interrupted:
        log("interrupted")
    if code := INTERRUPTED if interrupted else int(progress.failed > 0):
        raise click.exceptions.Exit(code)


@contextmanager
def _results(path: Path | None) -> Iterator[Callable[[CollectedRollout], None]]:
    """Yield a function that appends a rollout to the file, whole lines only, as `gymgate collect` writes them.

    Raises `DataError` if the file cannot be written, also before anything is started.
    """
    if path is None:
        yield lambda rollout: None
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise _not_written(path, error) from error

    def append(rollout: CollectedRollout) -> None:
        try:
            file.write(to_line(rollout))
            file.flush()
        except OSError as error:
            raise _not_written(path, error) from error

    with file:
        yield append


def _not_written(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot write results to {path}: {error.strerror}", path=str(path))


def _rate(rollouts: int, progress: RunProgress) -> float | None:
    seconds = progress.last_finished - progress.started
    return rollouts / seconds if seconds > 0 else None


def as_dict(
    run: Collection, rows: Sequence[Mapping[str, Any]], *, interrupted: bool, error: str | None
) -> dict[str, Any]:
    """The closing table as JSON values, without its last line over all environments."""
    environments = {
        row["environment"]: {
            "ok": row["rollouts"] - row["failed"],
            **{key: value for key, value in row.items() if key != "environment"},
        }
        for row in (rows if len(rows) == 1 else rows[:-1])
    }
    return {
        "environments": environments,
        "reasons": dict(all_causes(run.progress.environments)),
        "seconds": run.progress.last_finished - run.progress.started,
        "replayed": run.replayed,
        "interrupted": interrupted,
        "error": error,
    }
