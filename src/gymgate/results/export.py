"""Runs in the forms that others read: a flat table for dataset libraries, and the input rows of the next run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from gymgate.core import codec
from gymgate.results.tables import checked_table, write_table
from gymgate.rollouts.transcript import text_of, transcript
from gymgate.runs.counted.aggregate import RunTable
from gymgate.runs.counted.metrics import keep
from gymgate.runs.counted.tasks import CollectedTasks, Task
from gymgate.runs.described.settings import policy_name
from gymgate.runs.stored.attempts import Attempt, task_name
from gymgate.runs.stored.gym_rollouts import agent_ref
from gymgate.runs.stored.layout import FAILURES, ROLLOUTS
from gymgate.runs.stored.record import CollectedRollout
from gymgate.runs.stored.rows import RowReader
from gymgate.runs.stored.score import expected_answer, extracted_answer, score_of

COLUMNS = {
    **dict.fromkeys(("model", "run", "environment", "agent", "task", "label", "source"), "text"),
    "line": "whole",
    "row_key": "text",
    **dict.fromkeys(("occurrence", "repeat", "seed"), "whole"),
    **dict.fromkeys(("status", "error"), "text"),
    "reward": "real",
    **dict.fromkeys(("expected_answer", "extracted_answer"), "text"),
    "messages": "messages",
    "metrics": "text",
    **dict.fromkeys(("calls", "retries", "input_tokens", "output_tokens"), "whole"),
    "seconds": "real",
}
"""Columns of every flat table, and what they hold. `task` identifies the row; `label`, `source` and `line` say where it stood."""
_PART = "reward_parts."


def export_dataset(table: RunTable, output: Path) -> int:
    """Write a row per rollout, those that failed last, as JSONL, CSV or Parquet by the file's ending; how many.

    docs/export.md has the columns: `COLUMNS`, and `reward_parts.NAME` for each part of a reward in any of the rollouts.
    Raises `ConfigError` for another ending, `MissingExtraError` without pyarrow, `DataError` if the file cannot be written.
    """
    checked_table(output)
    model, parts = policy_name(table.policy) if table.policy else None, table.reward_parts

    def row_of(attempt: Attempt) -> dict[str, Any]:
        run = str(attempt.path.parent if attempt.path.name in (ROLLOUTS, FAILURES) else attempt.path)
        return table_row(attempt, model, run, parts, table.tasks.failed_as)

    columns = {**COLUMNS, **{f"{_PART}{name}": "real" for name in parts}}
    return write_table(
        output, map(row_of, table.rollouts(failed=True)), lambda arrow: _schema(arrow, columns)
    )


def export_rows(
    collected: CollectedTasks,
    output: Path,
    low: float,
    high: float,
    rows: RowReader,
    *,
    easiest_first: bool = False,
) -> int:
    """Write the input rows of the tasks whose mean reward lies between two bounds, read again from their files; how many.

    They come in the order of the runs' rows, or with `easiest_first` by mean reward, the highest first, equal ones as before.
    Rows of several environments name the agent that ran them, so that each goes to its own environment again. Raises
    `ConfigError` for another ending than .jsonl, `DataError` where a file no longer has a row.
    """
    checked_table(output, (".jsonl",))
    tasks = list(keep(collected, low, high))
    if easiest_first:
        tasks.sort(key=lambda task: -fmean(task.rewards()))
    several = len({task.environment for task in tasks}) > 1

    def row_of(task: Task) -> dict[str, Any]:
        row = rows.read(task.source, task.key, task.line)
        return {**row, "agent_ref": agent_ref(task.agent)} if several else row

    return write_table(output, map(row_of, tasks))


def export_lines(table: RunTable, output: Path) -> int:
    """Write the record of every finished rollout, a line each; how many.

    Raises `ConfigError` for another ending than .jsonl, `DataError` if the file cannot be written.
    """
    checked_table(output, (".jsonl",))
    return write_table(output, (attempt.record for attempt in table.rollouts()))


def table_row(
    rollout: Attempt | CollectedRollout,
    model: str | None,
    run: str | None,
    parts: Sequence[str],
    failed_as: float | None = None,
) -> dict[str, Any]:
    """Return `COLUMNS` of a rollout, and `reward_parts.NAME` for each of `parts`. One that failed has the reward `failed_as`."""
    score = score_of(rollout)
    counted = (rollout.reward_parts or {}) if score.outcome.counted else {}
    answers = (expected_answer(rollout.result), extracted_answer(rollout.result, rollout.answer_found))
    expected, extracted = (None if answer is None else text_of(answer) for answer in answers)
    return {
        "model": model,
        "run": run,
        "environment": rollout.environment,
        "agent": rollout.agent,
        "task": str(score.task),
        "label": task_name(rollout.environment, rollout.line, rollout.occurrence),
        "source": rollout.source,
        "line": rollout.line,
        "row_key": rollout.row_key,
        "occurrence": rollout.occurrence,
        "repeat": rollout.repeat,
        "seed": rollout.seed,
        "status": "failed" if score.outcome.reason == "failed" else rollout.status,
        "error": score.cause if score.outcome.reason == "failed" else None,
        "reward": failed_as if score.outcome.reason == "failed" else score.outcome.reward,
        "expected_answer": expected,
        "extracted_answer": extracted,
        "messages": [{"role": role, "content": text} for role, text in transcript(rollout.result)],
        "metrics": codec.dumps(rollout.metrics or {}).decode(),
        "calls": score.calls,
        "retries": score.retries,
        "input_tokens": score.input_tokens,
        "output_tokens": score.output_tokens,
        "seconds": score.seconds,
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
