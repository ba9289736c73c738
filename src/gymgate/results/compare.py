"""Two runs of the same rows, compared pair by pair: the same row, the same seed and repeat."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gymgate.core.errors import DataError
from gymgate.results.page import Part, conversation, table, task_parts, write_page
from gymgate.rollouts.row import TaskKey
from gymgate.rollouts.transcript import opening
from gymgate.runs.counted import statistics as st
from gymgate.runs.counted.aggregate import RunTable
from gymgate.runs.counted.counts import OVERALL
from gymgate.runs.counted.tasks import CollectedTasks, Task
from gymgate.runs.described.plan import Order
from gymgate.runs.described.settings import context_overflow_of, example_note
from gymgate.runs.stored.score import score_of


class Flip(NamedTuple):
    """A row whose mean reward differs between the runs."""

    task: Task
    """The row in the first run."""
    other: Task
    """The row in the second run."""
    difference: float
    """Mean of the second run's rewards minus that of the first's, over the row's pairs."""


class Comparison(NamedTuple):
    """What two runs have in common, and where they differ."""

    rows: list[dict[str, Any]]
    """One per environment, and one over all if there are several; see `compare`."""
    flips: list[Flip]
    """The largest differences first."""
    only_first: list[Task]
    """Rows that the first run alone has."""
    only_second: list[Task]


class _Pairs(NamedTuple):
    """The rollouts of one row that both runs have."""

    task: Task
    other: Task
    first: list[float]
    second: list[float]
    """Rewards of the same length: a pair is one of each."""
    left_out: int
    """Pairs in which one has no reward that counts: it failed, was masked or was not scored."""
    failed: list[tuple[float | None, float | None]]
    """Both rewards of the pairs in which one or both failed; `None` is a failure."""

    @property
    def differences(self) -> list[float]:
        # Rewards that differ by rounding are equal.
        pairs = zip(self.first, self.second, strict=True)
        return [0.0 if math.isclose(a, b) else b - a for a, b in pairs]


def compare(first: CollectedTasks, second: CollectedTasks) -> Comparison:
    """Compare two runs by the rollouts whose rewards count in both. Raises `DataError` if no row, or no seed and
    repeat of one, is in both.

    A row of the result has `pairs`, the mean reward of either run over them (`first`, `second`), their `difference` with
    its standard error, clustered by row (`difference_se`), and its t interval, cut at what is possible for rewards of 0 to 1
    (`difference_ci95_low`, `_high`), the pairs in which the second run's reward is higher (`better`) or lower (`worse`), and
    the two-sided p value of a sign-flip permutation test of the rows (`p`), which decides. `rows_needed` is about how many rows
    have 80% power for a difference this large, where it decides nothing; `failed_needed` how many failed rollouts undo the
    decision, had the loser's got 1 and the winner's 0, where some do. `rows` are in both runs, and `rows_paired` of them have a
    pair. `left_out` counts pairs without both rewards, `only_first` and `only_second` the rows that one run alone has.
    """
    here, there = _by_row(first), _by_row(second)
    paired = [_paired(task, there[name]) for name, task in here.items() if name in there]
    if not paired:
        raise DataError("no row is in both runs: they are compared by the rows' content")
    alone = (
        [task for name, task in here.items() if name not in there],
        [task for name, task in there.items() if name not in here],
    )
    if not any(pairs.first or pairs.left_out for pairs in paired):
        raise DataError("no rollout is in both runs: those of the rows in both have other seeds or repeats")
    environments = sorted({task.environment for task in (*first.tasks.values(), *second.tasks.values())})
    rows = [_row(name, paired, (first, second), alone) for name in environments]
    if len(environments) > 1:
        rows.append({**_row(None, paired, (first, second), alone), "environment": OVERALL})
    flips = [
        Flip(pairs.task, pairs.other, difference)
        for pairs in paired
        if (difference := st.mean(pairs.differences))
    ]
    return Comparison(
        rows,
        sorted(flips, key=lambda flip: (-abs(flip.difference), flip.task.name)),
        *alone,
    )


def _by_row(collected: CollectedTasks) -> dict[TaskKey, Task]:
    """Return the tasks by environment, row key and number of equal rows before them in their environment.

    `occurrence` counts the equal rows of all environments of a run, so another run may have other environments before it.
    """
    counts: Counter[tuple[str, str]] = Counter()
    tasks = {}
    for task in sorted(collected.tasks.values(), key=lambda task: task.occurrence):
        row = task.environment, task.row_key
        tasks[TaskKey(*row, counts[row])] = task
        counts[row] += 1
    return tasks


def why_worse(rows: Sequence[Mapping[str, Any]], limit: float) -> str | None:
    """Return why `--fail-if-worse` fails; `None` if it does not. Without a pair there is nothing to judge by."""
    unjudged = [str(row["environment"]) or "?" for row in rows if row["rows"] and not row["pairs"]]
    if unjudged:
        return f"not measured in {', '.join(unjudged)}: no rollout has a reward that counts in both"
    difference = rows[-1]["difference"]
    is_worse = difference < -limit and not math.isclose(difference, -limit, abs_tol=1e-9)
    return f"the difference is {difference:+.3g}" if is_worse else None


def differing_overflows(first: RunTable, second: RunTable) -> tuple[str, str] | None:
    """Return what either does with context overflows, if that differs."""
    one, other = (
        ", ".join(sorted({kind for run in table.runs if (kind := context_overflow_of(run.settings))}))
        for table in (first, second)
    )
    return (one, other) if one and other and one != other else None


def write_comparison(
    output: Path, compared: Comparison, runs: Sequence[RunTable], names: Sequence[str], tasks: int
) -> None:
    """Write an HTML page with the table and the conversations of the rows that differ most, side by side."""
    flips = {flip.task.key: flip for flip in compared.flips[:tasks]}
    rollouts: dict[TaskKey, list[Part]] = {key: [] for key in flips}
    openings: dict[TaskKey, str] = {}
    keys = ({key: key for key in flips}, {flip.other.key: key for key, flip in flips.items()})
    for run, label, key_of in zip(runs, names, keys, strict=True):
        for attempt in run.rollouts():
            if (key := key_of.get(attempt.task_key)) is not None:
                rollouts[key].append(conversation(attempt, score_of(attempt).outcome, label))
                openings.setdefault(key, opening(attempt.result))
    notes = [example_note(len(runs[0].tasks.tasks))] if all(run.is_example for run in runs) else []
    parts = _parts(compared, flips, rollouts, openings, names, notes)
    write_page(output, f"{names[1]} (B) compared with {names[0]} (A)", parts)


def verdict(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Say which of two runs has the higher mean reward in an environment, or that the pairs cannot tell."""
    where = "all environments" if row["environment"] == OVERALL else row["environment"]
    difference, low, p = row["difference"], row["difference_ci95_low"], row["p"]
    if difference is None:
        return f"{where}: no pair has a reward that counts in both"
    if not (row["better"] or row["worse"]):
        return f"{where}: equal rewards in all {row['pairs']} pairs"
    interval = "" if low is None else f"95% interval {low:+.3f} to {row['difference_ci95_high']:+.3f}, "
    size, certainty = f"{difference:+.3f}", f"{interval}p {shown_p(p)}"
    rows = row["rows_paired"]
    if p <= st.LEVEL:
        return f"{where}: {names[difference > 0]} is better, {size} ({certainty}, {rows} rows){_despite_failures(row)}"
    needed = row["rows_needed"]
    few = f"; fewer than {st.FEWEST_TASKS} rows never can" if rows < st.FEWEST_TASKS else ""
    power = "" if needed is None else f"; for such a difference, 80% power needs about {needed:,} rows"
    pairs = f"{row['pairs']} pairs of {rows} rows" if rows > 1 else "one row"
    return f"{where}: {pairs} cannot tell, {size} ({certainty}){few}{power}"


def shown_p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def _despite_failures(row: Mapping[str, Any]) -> str:
    """Say how many failed rollouts undo a decision."""
    if row["failed_needed"] is None:
        return ""
    loser, winner = ("A", "B") if row["difference"] > 0 else ("B", "A")
    failed = {"A": row["failed_first"], "B": row["failed_second"]}
    whose, had = f" of {loser}", "passed"
    if failed[winner]:
        whose, had = (
            ("", f"passed in {loser} or got 0 in {winner}") if failed[loser] else (f" of {winner}", "got 0")
        )
    return f"; holds unless {row['failed_needed']} of the {sum(failed.values())} failed{whose} had {had}"


def _parts(
    compared: Comparison,
    flips: Mapping[TaskKey, Flip],
    rollouts: Mapping[TaskKey, Sequence[Part]],
    openings: Mapping[TaskKey, str],
    names: Sequence[str],
    notes: Sequence[str],
) -> Iterator[Part]:
    for row in compared.rows:
        yield {"headline": verdict(row, names)}
    yield from ({"note": note} for note in notes)
    yield table(compared.rows)
    yield {"heading": "Rows that differ"}
    yield {"filters": {}}
    for key, flip in flips.items():
        name = f"{flip.difference:+.3f} {flip.task.name} {openings.get(key, '')}".strip()
        yield from task_parts(flip.task.environment, name, rollouts[key], str(key))


def _paired(first: Task, second: Task) -> _Pairs:
    here, there = _rewards(first), _rewards(second)
    common = [order for order in here if order in there]
    counted = [order for order in common if here[order] is not None and there[order] is not None]
    mine, other = ([side[order] or 0.0 for order in counted] for side in (here, there))
    losses = ((here, first.failures), (there, second.failures))
    ended = (
        order for order in common if all(side[order] is not None or order in lost for side, lost in losses)
    )
    failed = [pair for order in ended if None in (pair := (here[order], there[order]))]
    return _Pairs(first, second, mine, other, len(common) - len(counted), failed)


def _rewards(task: Task) -> dict[Order, float | None]:
    """Return the rewards that count by seed and repeat, with `None` for rollouts without one."""
    finished = {score.order: score.outcome.reward for score in task.scores}
    return finished | dict.fromkeys(task.failures, task.failed_as)


def _row(
    environment: str | None,
    paired: Sequence[_Pairs],
    runs: tuple[CollectedTasks, CollectedTasks],
    alone: tuple[Sequence[Task], Sequence[Task]],
) -> dict[str, Any]:
    """Return the row of an environment, or of all (`None`); `alone` are the tasks that one run alone has."""

    def is_of(task: Task) -> bool:
        return environment in (task.environment, None)

    mine = [pairs for pairs in paired if is_of(pairs.task)]
    differences = [pairs.differences for pairs in mine]
    every = [difference for of_row in differences for difference in of_row]
    better, worse = (sum(sign * difference > 0 for difference in every) for sign in (1, -1))
    sides = [[reward for pairs in mine for reward in getattr(pairs, side)] for side in ("first", "second")]
    tasks = [task for pairs in mine for task in (pairs.task, pairs.other)]
    are_shares = all(0 <= reward <= 1 for task in tasks for reward in task.rewards())
    mean, error, count = st.mean(every), st.clustered_error(differences), sum(map(bool, differences))
    low, high = st.confidence_interval(
        mean, error, count, (-1.0, 1.0) if are_shares else (-math.inf, math.inf)
    )
    if error is None and abs(mean or 0.0) < 1:  # the binomial interval is exact only at its ends
        low = high = None
    p = st.sign_flip_p([math.fsum(of_row) for of_row in differences]) if every else None
    decides = p is not None and p <= st.LEVEL
    return {
        "environment": environment,
        "first": st.mean(sides[0]),
        "second": st.mean(sides[1]),
        "difference": mean,
        "difference_se": error,
        "difference_ci95_low": low,
        "difference_ci95_high": high,
        "p": p,
        "rows_needed": None if decides else st.tasks_needed(mean or 0.0, error, count),
        "failed_needed": _undone_by(mine, mean or 0.0) if decides and are_shares else None,
        "pairs": len(every),
        "better": better,
        "worse": worse,
        "rows": len(mine),
        "rows_paired": count,
        "left_out": sum(pairs.left_out for pairs in mine),
        "failed_first": sum(task.failed for task in runs[0].tasks.values() if is_of(task)),
        "failed_second": sum(task.failed for task in runs[1].tasks.values() if is_of(task)),
        "only_first": sum(map(is_of, alone[0])),
        "only_second": sum(map(is_of, alone[1])),
    }


def _undone_by(paired: Sequence[_Pairs], difference: float) -> int | None:
    """Return how many failed rollouts undo what the test decides, had the loser's got 1 and the winner's 0; `None` if not even
    all do.

    Those that change the difference most come first, and of these the ones of rows that spoke for the loser, or those of the
    other rows: the fewer of the two. Trying every choice finds fewer only in rare cases of few rows.
    """
    sign = math.copysign(1.0, difference)
    sums = [sign * math.fsum(pairs.differences) for pairs in paired]
    steps = []
    for row, pairs in enumerate(paired):
        for a, b in pairs.failed:
            first, second = float(sign > 0) if a is None else a, float(sign < 0) if b is None else b
            if loss := sign * (first - second):
                steps.append((loss, (a is None) + (b is None), row))

    def is_undone(count: int) -> bool:
        totals = [*sums]
        for loss, _, row in steps[:count]:
            totals[row] -= loss
        return math.fsum(totals) <= 0 or st.sign_flip_p(totals) > st.LEVEL

    fewest = []
    for favoured in (1, -1):
        steps.sort(key=lambda step: (-step[0] / step[1], favoured * sums[step[2]]))
        count = bisect_left(range(1, len(steps) + 1), True, key=is_undone) + 1
        if count <= len(steps):
            fewest.append(sum(rollouts for _, rollouts, _ in steps[:count]))
    return min(fewest, default=None)
