"""`gymgate report`: runs as one HTML file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import click

from gymgate.cli.metrics_tables import accepted_answers
from gymgate.cli.options import (
    OUTPUT_FILE,
    failed_as_option,
    overlap_option,
    per_task_option,
    price_option,
    tasks_option,
)
from gymgate.cli.output import echo, log_next
from gymgate.results.report import write_report
from gymgate.runs.described.prices import Price


@click.command("report")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option("-o", "--output", type=OUTPUT_FILE, help="File to write. [report.html in the first RUN]")
@tasks_option
@per_task_option
@overlap_option
@failed_as_option
@price_option
def command(
    runs: tuple[Path, ...],
    output: Path | None,
    tasks: int,
    per_task: int,
    overlap: str,
    failed_as: float | None,
    prices: Mapping[str, Price],
) -> None:
    """Write runs as one HTML file.

    The file opens from disk and loads nothing else; it has metrics, charts, failures and conversations. RUN is a directory
    of gymgate run, or a rollouts.jsonl of NeMo Gym's collector.
    """
    first = runs[0] if runs[0].is_dir() else runs[0].parent
    path = output or first / "report.html"
    command_line = shlex.join(["gymgate", *sys.argv[1:]])
    write_report(
        runs,
        path,
        first_of_overlap=overlap == "first",
        failed_as=failed_as,
        tasks=tasks,
        per_task=per_task,
        prices=dict(prices),
        command=command_line,
        explain=accepted_answers,
    )
    echo(str(path))
    run = shlex.quote(str(runs[0]))
    log_next("open it in a browser", f"gymgate compare {run} OTHER" if len(runs) == 1 else "")
