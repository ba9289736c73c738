"""`gymgate aggregate`: metrics of runs and shards, per task, per environment and overall."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from gymgate.cli.metrics_tables import accepted_answers, print_costs, print_results
from gymgate.cli.options import (
    OUTPUT_FILE,
    failed_as_option,
    json_option,
    k_option,
    keep_option,
    log_to_option,
    overlap_option,
    price_option,
    wide_option,
)
from gymgate.cli.output import echo, log, log_next, print_json, print_table
from gymgate.core.errors import ConfigError
from gymgate.results.tables import checked_table, write_table
from gymgate.results.tracking import log_stored
from gymgate.runs.counted.aggregate import RunTable, read_runs
from gymgate.runs.counted.costs import TokenUsage
from gymgate.runs.counted.metrics import keep, parse_bounds, summary_rows, task_rows
from gymgate.runs.counted.summary import RunSummary
from gymgate.runs.counted.tasks import Task
from gymgate.runs.described.prices import Price, refuse_price_of_replay
from gymgate.runs.described.settings import example_note


@dataclass(frozen=True)
class AggregatedRuns(RunSummary):
    """What `gymgate aggregate --json` prints."""

    usage: Sequence[TokenUsage]
    """Tokens by environment and model server, with their cost if there is a price."""


@click.command("aggregate")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    type=OUTPUT_FILE,
    help="Write the metrics of each task: .jsonl, .csv or .parquet. Repeatable.",
)
@click.option(
    "--summary", type=OUTPUT_FILE, help="Write the metrics of each environment: .jsonl, .csv or .parquet."
)
@keep_option
@click.option(
    "--answer-key",
    metavar="FIELD",
    help="Field of the result that holds the answer, for maj@k. [known names]",
)
@overlap_option
@failed_as_option
@k_option
@wide_option
@click.option(
    "--worst",
    type=click.IntRange(min=1),
    metavar="N",
    help="Print the N tasks with the lowest mean reward, too.",
)
@price_option
@log_to_option
@click.option(
    "--complete",
    is_flag=True,
    help="Exit with 1 if rollouts or shards are missing or failed, or if a run does not say how many it should have.",
)
@click.option("--markdown", is_flag=True, help="Print the table as Markdown.")
@json_option
def command(
    runs: tuple[Path, ...],
    outputs: tuple[Path, ...],
    summary: Path | None,
    bounds: str | None,
    answer_key: str | None,
    overlap: str,
    failed_as: float | None,
    ks: Sequence[int] | None,
    wide: bool,
    worst: int | None,
    log_to: str | None,
    prices: Mapping[str, Price],
    complete: bool,
    markdown: bool,
    as_json: bool,
) -> None:
    """Print pass@1, pass@k and maj@k of runs, with standard errors.

    RUN is a directory of gymgate run (its shards are merged), or a rollouts.jsonl of NeMo Gym's
    collector. Metrics are fractions, not percent; after ± is the standard error over tasks. A narrow terminal gets fewer columns;
    --wide, --json and --summary have them all.
    """
    if markdown and as_json:
        raise ConfigError("--markdown and --json are two forms of one table: give one of them")
    for path in (*outputs, *([summary] if summary else [])):
        checked_table(path)
    if bounds is not None and not outputs:
        raise ConfigError(f"--keep {bounds} selects rows of a file: give it with -o")
    limits = parse_bounds(bounds) if bounds else None
    table = read_runs(runs, answer_key=answer_key, first_of_overlap=overlap == "first", failed_as=failed_as)
    collected = table.tasks
    metrics, notes = summary_rows(collected, ks), table.notes
    for note in notes:
        log(note)
    table.refuse_empty()
    refuse_price_of_replay(dict(prices), replayed=table.replayed)
    usage = collected.usage.rows(dict(prices))
    rows = list(task_rows(collected)) if outputs else []
    if limits is not None:
        selection = {task.key for task in keep(collected, *limits)}
        rows = [row for row in rows if (row["environment"], row["row_key"], row["occurrence"]) in selection]
    for path in outputs:
        write_table(path, rows)
    if summary is not None:
        write_table(summary, metrics)
    if log_to is not None:
        asyncio.run(log_stored(log_to, table, metrics, log))
    if as_json:
        if table.is_example:
            notes = [*notes, example_note(len(collected.tasks))]
        print_json(AggregatedRuns(metrics, table.replayed, notes, usage))
    else:
        print_results(
            metrics,
            replayed=table.replayed,
            ks=ks,
            wide=wide,
            markdown=markdown,
            is_example=table.is_example,
        )
        if worst is not None:
            echo()
            _print_lowest(collected.ordered(), worst)
        if prices:
            print_costs(usage, wide=wide, markdown=markdown)
        for line in accepted_answers(metrics, table.runs[0].settings.get("nemo_gym")):
            log(line)
        paths = " ".join(shlex.quote(str(run)) for run in runs)
        log_next(f"gymgate report {paths}", f"gymgate compare {paths} OTHER" if len(runs) == 1 else "")
    if complete and (reasons := [*table.missing, *_why_incomplete(table, metrics)]):
        log(f"--complete: {'; '.join(reasons)}")
        raise click.exceptions.Exit(1)


def _print_lowest(tasks: Sequence[Task], count: int) -> None:
    """Print the tasks with the lowest mean reward of those that have one, the lowest first, and their rewards."""
    scored = [(fmean(rewards), task.name, rewards) for task in tasks if (rewards := task.rewards())]
    lowest = nsmallest(count, scored, key=lambda row: row[0])
    print_table(
        ("task", "mean reward", "rewards"),
        [
            (name, f"{mean:.3f}", ", ".join(f"{reward:.4g}" for reward in rewards))
            for mean, name, rewards in lowest
        ],
    )


def _why_incomplete(table: RunTable, metrics: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield why `--complete` fails, in addition to what is missing of a plan that is known."""
    if metrics and (failed := metrics[-1]["failed"]):
        yield f"rollouts that failed: {failed}"
    for run in table.runs:
        if run.extent is None or run.extent.rollouts is None:
            yield f"{run.path}: not known how many rollouts were planned"
