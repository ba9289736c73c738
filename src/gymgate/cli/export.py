"""`gymgate export`: runs in the forms that others read."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection
from pathlib import Path

import click

from gymgate.cli.options import OUTPUT, dataset_option, failed_as_option, keep_option, overlap_option
from gymgate.cli.output import log, log_next
from gymgate.core.errors import ConfigError
from gymgate.results.atif import export_trajectories
from gymgate.results.export import export_dataset, export_lines, export_rows
from gymgate.runs.counted.aggregate import RunTable, read_runs
from gymgate.runs.counted.metrics import keep, parse_bounds
from gymgate.runs.stored.gym_rollouts import export_rollouts
from gymgate.runs.stored.rows import RowReader

EXPORTS = {
    "atif": export_trajectories,
    "dataset": export_dataset,
    "jsonl": export_lines,
}
"""Those that need no SDK."""


_FINISHED_ALONE = ("gym", "jsonl", "traces")
"""Forms in which a rollout that failed has no place."""


@click.command("export")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "--to",
    "form",
    required=True,
    type=click.Choice(["atif", "dataset", "gym", "inspect", "jsonl", "rows", "traces"]),
    help="atif: a directory of trajectories in Harbor's ATIF; dataset: a flat table for dataset libraries (.parquet, "
    ".csv, .jsonl); gym: NeMo Gym's rollouts.jsonl, with its materialized inputs next to it; inspect: a log for `inspect view` "
    "(.eval); jsonl: gymgate's own records, as in rollouts.jsonl; "
    "rows: the input rows, the next run's input (.jsonl); traces: verifiers' traces.jsonl.",
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=OUTPUT,
    metavar="FILE|DIR",
    help="File to write; for atif, a directory that is not there yet.",
)
@keep_option
@click.option(
    "--order",
    type=click.Choice(["input", "pass-rate"]),
    default="input",
    show_default=True,
    help="Order of --to rows: as the run read them, or by mean reward, the easiest first.",
)
@dataset_option
@overlap_option
@failed_as_option
def command(
    runs: tuple[Path, ...],
    form: str,
    output: Path,
    bounds: str | None,
    order: str,
    datasets: tuple[str, ...],
    overlap: str,
    failed_as: float | None,
) -> None:
    """Write rollouts or rows in a form that others read.

    RUN is a directory of gymgate run, with its shards, or (not for atif, gym and rows) a rollouts.jsonl from
    elsewhere, as NeMo Gym's collector writes it.
    """
    if bounds is not None and form != "rows":
        raise ConfigError(f"--keep selects rows: it needs --to rows, not --to {form}")
    if order != "input" and form != "rows":
        raise ConfigError(f"--order sorts rows: it needs --to rows, not --to {form}")
    if failed_as is not None and form not in ("dataset", "rows"):
        raise ConfigError(f"--failed-as counts failures: it needs --to dataset or rows, not --to {form}")
    table = read_runs(runs, first_of_overlap=overlap == "first", failed_as=failed_as)
    if form in ("atif", "gym", "rows") and (files := [run.path for run in table.runs if run.is_file]):
        raise ConfigError(
            f"--to {form} needs the input rows, which {files[0]} does not hold: give a directory of gymgate run"
        )
    environments: Collection[str] = ()
    if form == "rows":
        limits = parse_bounds(bounds) if bounds else (-math.inf, math.inf)
        tasks = table.tasks
        environments = {task.environment for task in keep(tasks, *limits)}
        easiest_first = order == "pass-rate"
        count = export_rows(tasks, output, *limits, RowReader(datasets), easiest_first=easiest_first)
        written = f"{count} of {len(tasks.tasks)} rows"
    elif form == "gym":
        written = f"{export_rollouts(table, output, RowReader(datasets))} rollouts"
    else:
        written = f"{_export(table, form, output)} rollouts"
    for note in (*table.strange, *table.missing):
        log(note)
    if form in _FINISHED_ALONE and (failed := sum(task.failed for task in table.tasks.tasks.values())):
        written += f"; {failed} that failed left out"
    log(f"{output}: {written}")
    log_next(_step_after(form, output, environments))


def _step_after(form: str, output: Path, environments: Collection[str]) -> str:
    """Return what reads an export, as a command, in Python, or in words. `environments` are those of exported rows."""
    path = shlex.quote(str(output))
    rows = f"{shlex.quote(min(environments))} --data {path}" if len(environments) == 1 else path
    if form == "dataset":
        reader = {".parquet": "read_parquet", ".csv": "read_csv"}.get(output.suffix, "read_json")
        lines = ", lines=True" if reader == "read_json" else ""
        return f"in Python: pandas.{reader}({str(output)!r}{lines})"
    return {
        "atif": f"{path} holds a trajectory per file, for Harbor's tools",
        "gym": f"gymgate aggregate {path}",
        "inspect": f"inspect view --log-dir {shlex.quote(str(output.parent))}",
        "jsonl": f"in Python: pandas.read_json({str(output)!r}, lines=True)",
        "rows": f"gymgate run {rows} -b URL",
        "traces": f"in Python: pandas.read_json({str(output)!r}, lines=True)",
    }[form]


def _export(table: RunTable, form: str, output: Path) -> int:
    if form in EXPORTS:
        return EXPORTS[form](table, output)
    from gymgate.integrations.versions import require

    if form == "inspect":
        require("inspect")
        from gymgate.integrations.inspect.eval_log import export_log

        return export_log(table, output)
    require("nemogym")
    from gymgate.integrations.verifiers.traces import export_traces

    return export_traces(table, output)
