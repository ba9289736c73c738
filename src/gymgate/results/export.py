"""Runs in the forms that others read: a flat table for dataset libraries, and the input rows of the next run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gymgate.core import codec
from gymgate.results.tables import checked_table, write_table
from gymgate.rollouts.transcript import text_of, transcript
from gymgate.runs.aggregate import Runs
from gymgate.runs.attempts import Attempt
from gymgate.runs.gym_rollouts import agent_ref
from gymgate.runs.layout import ROLLOUTS
from gymgate.runs.metrics import keep
from gymgate.runs.rows import RowReader
from gymgate.runs.settings import policy_name
from gymgate.runs.tasks import CollectedTasks, Task

COLUMNS = {
    **dict.fromkeys(("model", "run", "environment", "agent", "task", "source"), "text"),
    "line": "whole",
    "row_key": "text",
    **dict.fromkeys(("occurrence", "repeat", "seed"), "whole"),
    "status": "text",
    "reward": "real",
    **dict.fromkeys(("expected_answer", "extracted_answer"), "text"),
    "messages": "messages",
    "metrics": "text",
    **dict.fromkeys(("calls", "output_tokens"), "whole"),
    "seconds": "real",
}
"""Columns of every flat table, and what they hold. `task` identifies the row; `source` and `line` say where it stood."""
_PART = "reward_parts."


def export_dataset(runs: Runs, output: Path) -> int:
    """Write a row per finished rollout, as JSONL, CSV or Parquet by the file's ending; how many.

    docs/export.md has the columns: `COLUMNS`, and `reward_parts.NAME` for each part of a reward in any of the rollouts, for
    which they are read once before. Raises `ConfigError` for another ending and for rollouts that are in two runs,
    `MissingExtraError` without pyarrow, `DataError` if the file cannot be written.
    """
    checked_table(output)
    model = policy_name(runs.policy) if runs.policy else None
    parts = part_names(runs.rollouts())

    def row_of(attempt: Attempt) -> dict[str, Any]:
        run = str(attempt.path.parent if attempt.path.name == ROLLOUTS else attempt.path)
        return table_row(attempt, model, run, parts)

    columns = {**COLUMNS, **{f"{_PART}{name}": "real" for name in parts}}
    return write_table(output, map(row_of, runs.rollouts()), lambda arrow: _schema(arrow, columns))


def export_rows(
    collected: CollectedTasks, output: Path, low: float, high: float, *, easiest_first: bool = False
) -> int:
    """Write the input rows of the tasks whose mean reward lies between two bounds, read again from their files; how many.

    They come in the order of the runs' rows, or with `easiest_first` by mean reward, the highest first, equal ones as before.
    Rows of several environments name the agent that ran them, so that each goes to its own environment again. Raises
    `ConfigError` for another ending than .jsonl, `DataError` where a file no longer has a row.
    """
    checked_table(output, (".jsonl",))
    rows = RowReader()
    tasks = list(keep(collected, low, high))
    if easiest_first:
        tasks.sort(key=lambda task: -fmean(task.rewards()))
    several = len({task.environment for task in tasks}) > 1

    def row_of(task: Task) -> dict[str, Any]:
        row = rows.read(task.source, task.key, task.line)
        return {**row, "agent_ref": agent_ref(task.agent)} if several else row

    return write_table(output, map(row_of, tasks))


def export_lines(runs: Runs, output: Path) -> int:
    """Write the record of every finished rollout, a line each; how many.

    Raises `ConfigError` for another ending than .jsonl and for rollouts that are in two runs, `DataError` if the file cannot be
    written.
    """
    checked_table(output, (".jsonl",))
    return write_table(output, (attempt.record for attempt in runs.rollouts()))


def part_names(attempts: Iterable[Attempt]) -> list[str]:
    """Return the names of all parts of rewards."""
    return sorted({name for attempt in attempts for name in attempt.reward_parts or ()})


def table_row(attempt: Attempt, model: str | None, run: str | None, parts: Sequence[str]) -> dict[str, Any]:
    """Return `COLUMNS` of a rollout, and `reward_parts.NAME` for each of `parts`."""
    counted = (attempt.reward_parts or {}) if attempt.outcome.counted else {}
    answers = (attempt.expected_answer, attempt.extracted_answer)
    expected, extracted = (None if answer is None else text_of(answer) for answer in answers)
    return {
        "model": model,
        "run": run,
        "environment": attempt.environment,
        "agent": attempt.agent,
        "task": str(attempt.task_key),
        "source": attempt.source,
        "line": attempt.line,
        "row_key": attempt.row_key,
        "occurrence": attempt.occurrence,
        "repeat": attempt.repeat,
        "seed": attempt.seed,
        "status": attempt.status,
        "reward": attempt.outcome.reward,
        "expected_answer": expected,
        "extracted_answer": extracted,
        "messages": [{"role": role, "content": text} for role, text in transcript(attempt.result)],
        "metrics": codec.dumps(attempt.metrics or {}).decode(),
        "calls": attempt.call_count,
        "output_tokens": attempt.output_tokens,
        "seconds": attempt.seconds,
        **{f"{_PART}{name}": counted.get(name) for name in parts},
    }


def _schema(arrow: Any, columns: Mapping[str, str]) -> Any:
    text = arrow.string()
    types = {
        "text": text,
        "whole": arrow.int64(),
        "real": arrow.float64(),
        "messages": arrow.list_(arrow.struct([("role", text), ("content", text)])),
    }
    return arrow.schema({name: types[kind] for name, kind in columns.items()})
