"""`gymgate aggregate`: figures of runs and shards, per task, per environment and overall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import orjson

from gymgate.cli.aggregate_table import as_markdown, as_text
from gymgate.collection.aggregate import read_runs
from gymgate.collection.dataset_export import export_dataset
from gymgate.collection.figures import keep, parse_bounds, summary_rows, task_rows
from gymgate.collection.gym_rollouts import export_rollouts
from gymgate.collection.tables import checked_table, write_table
from gymgate.collection.tasks import Collected
from gymgate.errors import ConfigError, DataError


@click.command("aggregate")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the tasks' figures: .jsonl, .csv or .parquet; may be given more than once.",
)
@click.option(
    "--summary",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the environments' figures: .jsonl, .csv or .parquet.",
)
@click.option(
    "--keep", "bounds", metavar="LOW..HIGH", help="With --rows: only rows whose mean reward lies there."
)
@click.option(
    "--rows",
    "rows",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the input rows, with --keep those it keeps, as JSONL: the next run's input.",
)
@click.option(
    "--answer-key",
    metavar="FIELD",
    help="Field of the result that holds the answer, for maj@k. [known names]",
)
@click.option(
    "--overlap",
    type=click.Choice(["refuse", "first"]),
    default="refuse",
    show_default=True,
    help="A rollout that is in two runs.",
)
@click.option(
    "--gym-rollouts",
    "gym_output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the rollouts as NeMo Gym's collector does, inputs beside them.",
)
@click.option(
    "--dataset",
    "dataset_output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the rollouts as a flat table for dataset libraries: .jsonl or .parquet.",
)
@click.option(
    "--traces",
    "traces_output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the rollouts as verifiers saves its traces: traces.jsonl.",
)
@click.option("--complete", is_flag=True, help="Exit with 1 if rollouts or shards are missing.")
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Summary as JSON on stdout.")
def command(
    runs: tuple[Path, ...],
    outputs: tuple[Path, ...],
    summary: Path | None,
    bounds: str | None,
    rows: Path | None,
    answer_key: str | None,
    overlap: str,
    gym_output: Path | None,
    dataset_output: Path | None,
    traces_output: Path | None,
    complete: bool,
    markdown: bool,
    as_json: bool,
) -> None:
    """Merge runs and their shards and print pass@1, pass@k and maj@k with standard errors.

    RUN is a directory of gymgate collect, whose shards are found, or a rollouts.jsonl of NeMo Gym's collector.
    Figures are fractions, not percent; behind ± stands the standard error over tasks, and under ±runs that of pass@1
    over runs (seeds and repeats).
    """
    if markdown and as_json:
        raise ConfigError("--markdown and --json are two forms of one table: give one of them")
    for path in (*outputs, *([summary] if summary else [])):
        checked_table(path)
    if rows is not None and rows.suffix != ".jsonl":
        raise ConfigError(f"--rows {rows}: rows are JSONL; give it that ending")
    limits = parse_bounds(bounds) if bounds else (float("-inf"), float("inf"))
    collected = read_runs(runs, answer_key=answer_key, first_of_overlap=overlap == "first")
    for note in collected.notes:
        click.echo(note, err=True)
    found = summary_rows(collected)
    for path in outputs:
        write_table(path, _kept_rows(collected, limits) if bounds else task_rows(collected))
    if summary is not None:
        write_table(summary, found)
    if rows is not None:
        _write_rows(rows, collected, limits)
    if gym_output is not None:
        count = export_rollouts([run for run in runs if run.is_dir()], gym_output)
        click.echo(f"{gym_output}: {count} rollouts", err=True)
    if dataset_output is not None:
        click.echo(f"{dataset_output}: {export_dataset(runs, dataset_output)} rollouts", err=True)
    if traces_output is not None:
        click.echo(f"{traces_output}: {_export_traces(runs, traces_output)} rollouts", err=True)
    if as_json:
        click.echo(orjson.dumps({"environments": found, "notes": collected.notes}))
    else:
        for line in as_markdown(found) if markdown else as_text(found):
            click.echo(line)
    if complete and collected.missing:
        raise click.exceptions.Exit(1)


def _export_traces(runs: tuple[Path, ...], output: Path) -> int:
    from gymgate.integrations.verifiers.knobs import require_verifiers

    require_verifiers()
    from gymgate.integrations.verifiers.traces import export_traces

    return export_traces(runs, output)


def _kept_rows(collected: Collected, limits: tuple[float, float]) -> list[dict[str, Any]]:
    kept = {(task.environment, task.row_key, task.occurrence) for task in keep(collected, *limits)}
    return [
        row for row in task_rows(collected) if (row["environment"], row["row_key"], row["occurrence"]) in kept
    ]


def _write_rows(path: Path, collected: Collected, limits: tuple[float, float]) -> None:
    """The rows themselves, read again from their files; `DataError` where a file has changed."""
    from gymgate.dataset import open_rows

    opened: dict[str, Any] = {}
    found = []
    for task in keep(collected, *limits):
        if task.source not in opened:
            opened[task.source] = {row.key: row.data for row in open_rows(task.source, environment=None)}
        if task.row_key not in opened[task.source]:
            raise DataError(f"{task.source} no longer has row {task.row_key}", path=task.source)
        found.append(opened[task.source][task.row_key])
    write_table(path, found)
    click.echo(f"{path}: {len(found)} of {len(collected.tasks)} rows", err=True)
