"""Runs in the forms that others read: a flat table for dataset libraries, and the input rows of the next run."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from gymgate.core import codec
from gymgate.results.tables import checked_table, write_table
from gymgate.rollouts.transcript import transcript
from gymgate.runs.aggregate import Runs
from gymgate.runs.attempts import Attempt
from gymgate.runs.gym_rollouts import agent_ref
from gymgate.runs.metrics import keep
from gymgate.runs.rows import RowReader
from gymgate.runs.tasks import CollectedTasks, Task


def export_dataset(runs: Runs, output: Path) -> int:
    """Write a row per finished rollout, as JSONL or Parquet by the file's ending; how many.

    The columns, the same for every environment: `environment`, `agent`, `row_key`, `occurrence`, `repeat`, `seed`,
    `status`, `reward` (null where it does not count, see `gymgate.outcome_of`), `messages` (role and content, tool calls
    as text), `details` (reward parts and metrics as JSON), `calls`, `output_tokens`, `seconds`. Raises `ConfigError` for
    another ending and for rollouts that are in two runs, `MissingExtraError` without pyarrow, `DataError` if the file
    cannot be written.
    """
    checked_table(output, (".jsonl", ".parquet"))
    return write_table(output, map(_flat, runs.rollouts()), _schema)


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
        row = rows.read(task.source, task.row_key)
        return {**row, "agent_ref": agent_ref(task.agent)} if several else row

    return write_table(output, map(row_of, tasks))


def export_lines(runs: Runs, output: Path) -> int:
    """Write the record of every finished rollout, a line each; how many.

    Raises `ConfigError` for another ending than .jsonl and for rollouts that are in two runs, `DataError` if the file cannot be
    written.
    """
    checked_table(output, (".jsonl",))
    return write_table(output, (attempt.record for attempt in runs.rollouts()))


def _flat(attempt: Attempt) -> dict[str, Any]:
    parts = (attempt.reward_parts or {}) if attempt.outcome.counted else {}
    details = {"reward_parts": parts, "metrics": attempt.metrics or {}}
    return {
        "environment": attempt.environment,
        "agent": attempt.agent,
        "row_key": attempt.row_key,
        "occurrence": attempt.occurrence,
        "repeat": attempt.repeat,
        "seed": attempt.seed,
        "status": attempt.status,
        "reward": attempt.outcome.reward,
        "messages": [{"role": role, "content": text} for role, text in transcript(attempt.result)],
        "details": codec.dumps(details).decode(),
        "calls": attempt.call_count,
        "output_tokens": attempt.output_tokens,
        "seconds": attempt.seconds,
    }


def _schema(arrow: Any) -> Any:
    text, whole, real = arrow.string(), arrow.int64(), arrow.float64()
    return arrow.schema(
        {
            "environment": text,
            "agent": text,
            "row_key": text,
            "occurrence": whole,
            "repeat": whole,
            "seed": whole,
            "status": text,
            "reward": real,
            "messages": arrow.list_(arrow.struct([("role", text), ("content", text)])),
            "details": text,
            "calls": whole,
            "output_tokens": whole,
            "seconds": real,
        }
    )
