"""Tables of metrics: outcomes, as `gymgate run` and `eval run` end, and pass@k with its standard errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gymgate.cli.output import log, print_table
from gymgate.collection.progress import EnvironmentMetrics
from gymgate.rollout.outcome import Reason

SHOWN_CAUSES = 5
BESIDE_THE_MEAN: tuple[Reason, ...] = ("failed", "masked", "unscored", "truncated")
"""Outcomes with a column each; of these only truncated rollouts are in the mean."""
REPLAYED = "recorded answers"
"""In the column `policy`, where no model answered."""
COUNTS = ("tasks", "rollouts", "failed")
RUNS = "±runs"
"""Standard error of pass@1 over runs (seeds and repeats), beside the one over tasks."""
Rows = Sequence[Mapping[str, Any]]


def all_causes(environments: Mapping[str, EnvironmentMetrics]) -> Counter[str]:
    """Why rollouts failed or were masked, all environments together."""
    return sum((metrics.causes for metrics in environments.values()), Counter())


def print_outcomes(
    environments: Mapping[str, EnvironmentMetrics],
    rates: Mapping[str, float | None],
    *,
    replayed: bool = False,
) -> None:
    """Print outcomes and mean reward by environment to stdout, then why rollouts failed or were masked to stderr.

    `rates` are rollouts per second by environment; `replayed` adds a column that says that no model answered.
    """
    header = ("environment", "rollouts", "ok", *BESIDE_THE_MEAN, "mean reward", "rollouts/s")
    rows = [
        (
            name or "?",
            *map(str, (each.rollouts, each.ok, *(each.outcomes[reason] for reason in BESIDE_THE_MEAN))),
            _number(each.mean_reward, 3),
            _number(rates[name], 1),
        )
        for name, each in sorted(environments.items())
    ]
    print_table(*_with_policy(header, rows, replayed))
    causes = all_causes(environments)
    shown = causes.most_common(SHOWN_CAUSES)
    for cause, count in shown:
        log(f"{count} x {cause}")
    if rest := len(causes) - len(shown):
        log(f"and {rest} more reasons")


def print_summary(rows: Rows, *, replayed: bool, markdown: bool = False) -> None:
    """Print counts, pass@k and maj@k with their standard errors, a line per environment, to stdout."""
    header, lines = _with_policy(*_summary(rows), replayed)
    if not markdown:
        print_table(header, lines)
        return
    rule = ["---", *["---:"] * (len(header) - 1)]
    for line in (header, rule, *lines):
        print(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |")


def _summary(rows: Rows) -> tuple[Sequence[str], list[Sequence[str]]]:
    names = [*_numbered("pass@", rows), *(name for name in _numbered("maj@", rows) if name != "maj@1")]
    header = ["environment", *COUNTS]
    lines = [[str(row["environment"]), _tasks(row), str(row["rollouts"]), str(row["failed"])] for row in rows]
    for name in names:
        header.append(name)
        for line, row in zip(lines, rows, strict=True):
            line.append(_with_error(row.get(name), row.get(f"{name}_se")))
        if name == "pass@1":
            header.append(RUNS)
            for line, row in zip(lines, rows, strict=True):
                error = row.get("pass@1_se_runs")
                line.append("-" if error is None else f"±{error:.4f}")
    return header, list(lines)


def _tasks(row: Mapping[str, Any]) -> str:
    """The number of tasks, after the number that the metrics are over if it is another."""
    tasks, scored = row["tasks"], row["scored_tasks"]
    return str(tasks) if scored == tasks else f"{scored}/{tasks}"


def _with_policy(
    header: Sequence[str], rows: Sequence[Sequence[str]], replayed: bool
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    return ([*header, "policy"], [[*row, REPLAYED] for row in rows]) if replayed else (header, rows)


def _numbered(prefix: str, rows: Rows) -> list[str]:
    found = {
        name for row in rows for name in row if name.startswith(prefix) and name[len(prefix) :].isdigit()
    }
    return sorted(found, key=lambda name: int(name[len(prefix) :]))


def _with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if error is None else f"{value:.4f} ±{error:.4f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
