"""`gymgate compare`: runs of the same rows, pair by pair."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gymgate.cli.metrics_tables import shown_number
from gymgate.cli.options import (
    OUTPUT_FILE,
    FiniteRange,
    failed_as_option,
    json_option,
    overlap_option,
    wide_option,
)
from gymgate.cli.output import Column, echo, log, log_next, print_columns, print_json
from gymgate.core.errors import ConfigError
from gymgate.results.compare import (
    Comparison,
    compare,
    differing_overflows,
    shown_p,
    verdict,
    why_worse,
    write_comparison,
)
from gymgate.rollouts.row import TaskKey
from gymgate.rollouts.transcript import opening
from gymgate.runs.counted.aggregate import read_runs, scored_differently
from gymgate.runs.counted.tasks import Task
from gymgate.runs.described.settings import example_note, policy_name
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.score import Score

SHOWN_FLIPS = 5
SHOWN_ALONE = 3
"""Rows of one run alone that are printed."""
ON_PAGE = 50
"""Rows whose conversations the HTML file shows."""
WORSE = 1


@dataclass(frozen=True)
class DifferingRow:
    """A row whose mean reward differs between two runs."""

    row: str
    """What is in the column `task` of `gymgate export`."""
    name: str
    """`ENVIRONMENT:LINE`, for people."""
    difference: float


@dataclass(frozen=True)
class ComparedRun:
    """A run compared with the first one."""

    run: Path
    environments: Sequence[Mapping[str, Any]]
    """Columns of the table for each environment and, if there are several, over all."""
    flips: Sequence[DifferingRow]
    """The largest differences first."""
    only_first: Sequence[str]
    """Rows that the first run alone has, as in `row`."""
    only_second: Sequence[str]
    verdict: str
    """What the pairs tell, in a sentence."""
    notes: Sequence[str]
    """What a reader of the numbers has to know."""


@dataclass(frozen=True)
class ComparedRuns:
    """What `gymgate compare --json` prints."""

    base: Path
    compared: Sequence[ComparedRun]


@click.command("compare")
@click.argument("first", type=click.Path(path_type=Path), metavar="A")
@click.argument("others", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="B...")
@click.option(
    "--fail-if-worse",
    type=FiniteRange(0),
    metavar="D",
    help="Exit with 1 if the mean reward of B is lower than that of A by more than D, or if an environment has rows in both "
    "and no pair.",
)
@click.option(
    "-o",
    "--output",
    type=OUTPUT_FILE,
    help="Write an HTML file with the conversations of the rows that differ, side by side. With one B.",
)
@overlap_option
@failed_as_option
@wide_option
@json_option
def command(
    first: Path,
    others: tuple[Path, ...],
    fail_if_worse: float | None,
    output: Path | None,
    overlap: str,
    failed_as: float | None,
    wide: bool,
    as_json: bool,
) -> None:
    """Compare runs of the same rows, rollout by rollout.

    A and B are directories of gymgate run, or a rollouts.jsonl of NeMo Gym's collector. Rollouts of the same row, seed
    and repeat are a pair; pairs in which one failed or has no reward that counts are left out, unless --failed-as counts
    failures. After ± is the standard error of the difference, clustered by row; p is that of a permutation test of the rows: one
    run is better if it is at most 0.05, which takes 6 rows or more.

    \b
    gymgate compare runs/base runs/tuned
    gymgate compare runs/base runs/tuned --fail-if-worse 0.02 -o compare.html
    """
    if output is not None and len(others) > 1:
        raise ConfigError("-o shows two runs side by side: give one B")
    openings: dict[TaskKey, str] = {}

    def see(attempt: Attempt, score: Score) -> None:
        if not openings.get(score.task):
            openings[score.task] = opening(attempt.result)

    base = read_runs([first], first_of_overlap=overlap == "first", failed_as=failed_as, see=see)
    worse = False
    documents: list[ComparedRun] = []
    for other in others:
        against = read_runs([other], first_of_overlap=overlap == "first", failed_as=failed_as)
        compared = compare(base.tasks, against.tasks)
        policies = base.policy, against.policy
        models = [policy_name(policy) for policy in policies if policy and policy.get("type") != "replay"]
        names = models if len(set(models)) == 2 else [str(first), str(other)]
        if fail_if_worse is not None and (reason := why_worse(compared.rows, fail_if_worse)):
            log(f"{other}: --fail-if-worse {fail_if_worse:g}: {reason}")
            worse = True
        if (overflows := differing_overflows(base, against)) is not None:
            log(
                f"context overflows: {overflows[0]} in {first}, {overflows[1]} in {other} (--context-overflow), so one run "
                "scores rollouts that the other leaves out"
            )
        for note in scored_differently([base.runs[0], against.runs[0]]):
            log(note)
        for path, read in ((first, base), (other, against)):
            for note in read.notes:
                log(note if str(path) in note else f"{path}: {note}")
        decision = verdict(compared.rows[-1], names)
        notes = [example_note(len(base.tasks.tasks))] if base.is_example and against.is_example else []
        if as_json:
            flips = [
                DifferingRow(str(flip.task.key), flip.task.name, flip.difference) for flip in compared.flips
            ]
            alone = [[str(task.key) for task in side] for side in (compared.only_first, compared.only_second)]
            documents.append(ComparedRun(other, compared.rows, flips, alone[0], alone[1], decision, notes))
        else:
            echo(f"{other} (B) compared with {first} (A)")
            _print(compared.rows, wide=wide)
            for line in (*notes, decision):
                echo(line)
            _print_flips(compared, openings)
            _print_alone("A", compared.only_first)
            _print_alone("B", compared.only_second)
        if output is not None:
            write_comparison(output, compared, (base, against), names, ON_PAGE)
            log(f"page: {output}")
    if as_json:
        print_json(ComparedRuns(first, documents))
    else:
        pair = f"{shlex.quote(str(first))} {shlex.quote(str(others[0]))}"
        page = f"gymgate compare {pair} -o compare.html shows the conversations of rows that differ"
        log_next(page if output is None else f"open {output} in a browser")
    if worse:
        raise click.exceptions.Exit(WORSE)


def _print(rows: Sequence[Mapping[str, Any]], *, wide: bool) -> None:
    columns = [Column("environment", [str(row["environment"]) or "?" for row in rows], left=True)]

    def add(title: str, cell: Any, *, rank: int = 0, left: bool = False) -> None:
        columns.append(Column(title, [cell(row) for row in rows], rank=rank, left=left))

    add("pairs", lambda row: str(row["pairs"]))
    add("A", lambda row: shown_number(row["first"]))
    add("B", lambda row: shown_number(row["second"]))
    add("B - A ± se", _with_error, left=True)
    add("better", lambda row: str(row["better"]))
    add("worse", lambda row: str(row["worse"]))
    if any(row["p"] is not None for row in rows):
        add("p", lambda row: "-" if row["p"] is None else shown_p(row["p"]), rank=1)
    for name, title in (
        ("left_out", "no reward"),
        ("failed_first", "failed A"),
        ("failed_second", "failed B"),
        ("only_first", "rows only A"),
        ("only_second", "rows only B"),
    ):
        if any(row[name] for row in rows):
            add(title, lambda row, name=name: str(row[name]), rank=2)
    print_columns(columns, drop=not wide)


def _print_flips(compared: Comparison, openings: Mapping[TaskKey, str]) -> None:
    flips = compared.flips[:SHOWN_FLIPS]
    for flip in flips:
        echo(f"  {flip.difference:+.3f}  {flip.task.name}  {openings[flip.task.key]}".rstrip())
    if rest := len(compared.flips) - len(flips):
        echo(f"  and {rest} more {'row differs' if rest == 1 else 'rows differ'}")


def _print_alone(run: str, tasks: Sequence[Task]) -> None:
    """Name some rows that one run alone has."""
    names = ", ".join(task.name for task in tasks[:SHOWN_ALONE])
    if names:
        rest = len(tasks) - SHOWN_ALONE
        echo(f"  only in {run}: {names}{f' and {rest} more' if rest > 0 else ''}")


def _with_error(row: Mapping[str, Any]) -> str:
    if row["difference"] is None:
        return "-"
    error = row["difference_se"]
    return f"{row['difference']:+.3f} ±{'n/a' if error is None else f'{error:.3f}'}"
