"""The table of results: one for `gymgate run`, `eval run` and `aggregate`. A number in it is never broken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gymgate.cli.output import Column, echo, log, print_columns
from gymgate.core.config import POLICY, RuntimeConfig
from gymgate.gym.catalog.entries import PACKAGED_KINDS
from gymgate.runs.counted.costs import TokenUsage, dollars
from gymgate.runs.counted.counts import NOT_SCORED, OVERALL
from gymgate.runs.counted.metrics import numbered
from gymgate.runs.described.settings import example_note

Rows = Sequence[Mapping[str, Any]]


def print_results(
    rows: Rows,
    *,
    replayed: bool,
    ks: Sequence[int] | None = None,
    wide: bool = False,
    markdown: bool = False,
    is_example: bool = False,
) -> None:
    """Print the metrics of each environment, as `summary_rows` makes them, to stdout, and that their rows are examples.

    Below it stands the account of all rollouts, with `wide` that of each environment. A terminal that is too narrow gets fewer
    columns. `ks` are the k of pass@k, otherwise 1 and the largest; `wide` adds every other column.
    """
    columns = [Column("environment", [str(row["environment"]) or "?" for row in rows], left=True)]
    columns += _all_columns(rows) if wide else _columns(rows, ks)
    if replayed:
        columns.append(Column("policy", ["replayed"] * len(rows), left=True))
    _print(columns, markdown=markdown, drop=not wide)
    below = [row["account"] for row in rows[-1:]]
    if wide and len(rows) > 1:
        below = [f"{row['environment']}: {row['account']}" for row in rows]
    if is_example and rows:
        below.append(example_note(rows[-1]["tasks"]))
    for line in below:
        echo(f"{chr(10) * markdown}{line}")


def accepted_answers(rows: Rows, release: str | None = None) -> Iterator[str]:
    """Say, as `gymgate info` does, what graders accept that found no answer in over a third of the rollouts, or no right one."""
    from gymgate.quality.record.findings import right_answer
    from gymgate.quality.record.storage import shipped_record

    for row in rows:
        count, name, what = row["no_answer"], row["environment"], "no answer"
        if count * 3 <= row["rollouts"] and row["right"] == 0:
            count, what = row["wrong"] + count, "no right answer"
        if count * 3 <= row["rollouts"] or (name == OVERALL and len(rows) > 1):
            continue
        version = release or RuntimeConfig().version
        records = [record for kind in PACKAGED_KINDS if (record := shipped_record(kind, name, version))]
        known = (text for record in records if (text := right_answer(record)).startswith("accepts"))
        rewards = [float(reward) for each in records for reward in (each.shape.rewards if each.shape else ())]
        shown = f"gymgate run {name} --show prints recorded answers, with their rewards"
        see = shown if max(rewards, default=0.0) > 0 else f"See gymgate info {name}"
        found = f"{name}: the grader found {what} in {count} of {row['rollouts']} rollouts; was it in another form?"
        yield f"{found} {next((f'Right answer: {text}' for text in known), see)}"


def print_costs(usages: Sequence[TokenUsage], *, wide: bool, markdown: bool = False) -> None:
    """Print the tokens of each environment's policy and judges and their cost to stdout, as `UsageCounts.rows` returns them."""
    print()
    columns = [
        Column("environment", [usage.environment or "?" for usage in usages], left=True),
        Column(
            "model",
            ["policy" if usage.model_server == POLICY else usage.model_server for usage in usages],
            left=True,
        ),
        Column("rollouts", [f"{usage.rollouts:,}" for usage in usages]),
        Column("calls", [f"{usage.calls:,}" for usage in usages], rank=1),
        Column("input tokens", [_tokens(usage.input_tokens) for usage in usages]),
        Column("cached", [_cached(usage) for usage in usages], rank=1),
        Column("output tokens", [_tokens(usage.output_tokens) for usage in usages]),
        Column("cost", [dollars(usage.cost) for usage in usages]),
    ]
    _print(columns, markdown=markdown, drop=not wide)
    for usage in usages:
        if usage.counted < usage.rollouts and usage.environment != OVERALL:
            log(
                f"{usage.environment}: cost of {usage.counted} of {usage.rollouts} rollouts; the endpoint of "
                f"{usage.model_server} did not count the tokens of the others"
            )


def _tokens(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"


def _cached(usage: TokenUsage) -> str:
    share = "" if usage.cached_share is None else f" ({usage.cached_share:.0%})"
    return f"{_tokens(usage.cached_tokens)}{share}"


def _print(columns: Sequence[Column], *, markdown: bool, drop: bool) -> None:
    if not markdown:
        print_columns(columns, drop=drop)
        return
    lines = [[column.title for column in columns], ["---", *["---:"] * (len(columns) - 1)]]
    lines += [list(cells) for cells in zip(*(column.cells for column in columns), strict=True)]
    for line in lines:
        echo(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |")


def _columns(rows: Rows, ks: Sequence[int] | None) -> list[Column]:
    """Return the columns of a terminal; where it is too narrow, outcomes other than failures are dropped first, then pass@k."""
    names = numbered("pass@", rows)
    passes = [f"pass@{k}" for k in ks] if ks else [*names[:1], *names[1:][-1:]]
    counts = [name for name in NOT_SCORED if any(row[name] for row in rows)]
    columns = [_column(rows, "rollouts")]
    columns += (_column(rows, name, rank=0 if name == "failed" else 2) for name in counts)
    if any(row["scored_tasks"] != row["tasks"] for row in rows):
        columns += (
            _column(rows, name, title=name.replace("_", " "), rank=2) for name in ("tasks", "scored_tasks")
        )
    columns.append(_column(rows, "mean ± se", _mean, left=True))
    columns += _bounds(rows)
    columns += (_column(rows, name, rank=1) for name in passes)
    return columns


def _all_columns(rows: Rows) -> list[Column]:
    columns = [
        _column(rows, "tasks"),
        _column(rows, "scored_tasks", title="scored tasks"),
        _column(rows, "rollouts"),
    ]
    columns += (_column(rows, name) for name in ("scored", *NOT_SCORED))
    columns.append(_column(rows, "mean ± se", _mean, left=True))
    columns += _bounds(rows)
    majority = [name for name in numbered("maj@", rows) if name != "maj@1"]
    for name in (*numbered("pass@", rows), *majority):
        columns.append(_column(rows, name, lambda row, name=name: _with_error(row, name), left=True))
        if name == "pass@1":
            columns.append(_column(rows, "pass@1_ci95", _interval, left=True))
            columns.append(_column(rows, "±runs", lambda row: shown_number(row.get("pass@1_se_runs"))))
    if any(row.get("rollouts_per_s") is not None for row in rows):
        columns.append(_column(rows, "rollouts/s", lambda row: shown_number(row.get("rollouts_per_s"), 1)))
    return columns


def _column(
    rows: Rows, name: str, cell: Any = None, *, title: str = "", left: bool = False, rank: int = 0
) -> Column:
    def shown(row: Mapping[str, Any]) -> str:
        value = row.get(name)
        return str(value) if isinstance(value, int) else shown_number(value)

    return Column(title or name, [(cell or shown)(row) for row in rows], left=left, rank=rank)


def _bounds(rows: Rows) -> list[Column]:
    """Return a column with the mean reward if failed rollouts had got 0, and 1; none where nothing failed."""
    bounds = [(row["mean_if_failed_0"], row["mean_if_failed_1"]) for row in rows]
    if not any(low is not None for low, _ in bounds):
        return []
    cells = ["-" if low is None else f"{shown_number(low)} to {shown_number(high)}" for low, high in bounds]
    return [Column("if failed 0 to 1", cells, left=True, rank=1)]


def _mean(row: Mapping[str, Any]) -> str:
    return _with_error(row, "mean_reward")


def _interval(row: Mapping[str, Any]) -> str:
    low, high = row.get("pass@1_ci95_low"), row.get("pass@1_ci95_high")
    return "-" if low is None else f"{shown_number(low)} to {shown_number(high)}"


def _with_error(row: Mapping[str, Any], name: str) -> str:
    value, error = row.get(name), row.get(f"{name}_se")
    shown_error = "n/a" if error is None else shown_number(error)
    return shown_number(value) if value is None else f"{shown_number(value)} ±{shown_error}"


def shown_number(value: float | None, digits: int = 3) -> str:
    """Return a number of a table, `-` for none."""
    return "-" if value is None else f"{value:.{digits}f}"
