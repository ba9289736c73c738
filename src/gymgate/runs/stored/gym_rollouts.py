"""NeMo Gym's own form of collected rollouts, rollouts.jsonl and materialized inputs: written and read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymgate.core import codec
from gymgate.core.errors import DataError
from gymgate.core.files import replacing
from gymgate.rollouts.breakdowns import breakdown, counts_as_zero
from gymgate.rollouts.result import reward_parts, status_of
from gymgate.rollouts.row import TaskKey
from gymgate.rollouts.row_fields import agent_of
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.layout import holds_traces, without_run
from gymgate.runs.stored.record import line_error, read_values
from gymgate.runs.stored.rows import RowReader

if TYPE_CHECKING:
    from gymgate.runs.counted.aggregate import RunTable

TASK, ROLLOUT = "_ng_task_index", "_ng_rollout_index"


def export_rollouts(table: RunTable, output: Path, rows: RowReader | None = None) -> int:
    """Write finished rollouts as NeMo Gym's collector does; how many.

    The inputs that its profiler wants go to `NAME_materialized_inputs.jsonl` beside them. Raises
    `DataError` if a row's file has changed since, or if a file cannot be written.
    """
    inputs = inputs_beside(output)
    count = 0
    with replacing(inputs) as materialized, replacing(output) as results:
        for result, row in _numbered_rollouts(table, rows or RowReader()):
            results.write(codec.dumps(result) + b"\n")
            materialized.write(codec.dumps(row) + b"\n")
            count += 1
    return count


def _numbered_rollouts(table: RunTable, rows: RowReader) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Results and inputs with NeMo Gym's numbers."""
    numbering = RolloutNumbers(table)
    for attempt in table.rollouts():
        numbers = {**numbering.of(attempt), "agent_ref": agent_ref(attempt.agent)}
        row = rows.read(attempt.source, attempt.task_key, attempt.line)
        yield to_gym(attempt, numbers), {**row, **numbers}


class RolloutNumbers:
    """NeMo Gym's numbers of tasks, and of the rollouts of a task (by seed and repeat); failed ones get further numbers."""

    def __init__(self, table: RunTable) -> None:
        orders = sorted({score.order for task in table.tasks.tasks.values() for score in task.scores})
        self._orders = {order: number for number, order in enumerate(orders)}
        self._tasks: dict[TaskKey, int] = {}

    def of(self, attempt: Attempt) -> dict[str, int]:
        """Return the numbers of a rollout, for those that finished first, in their order."""
        return {
            TASK: self._tasks.setdefault(attempt.task_key, len(self._tasks)),
            ROLLOUT: self._orders.setdefault(attempt.identity.order, len(self._orders)),
        }


def agent_ref(name: str) -> dict[str, str]:
    """What a row names its agent with."""
    return {"type": "responses_api_agents", "name": name}


def to_gym(attempt: Attempt, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """One line of NeMo Gym's rollouts.jsonl."""
    result = {**(attempt.result or {}), "reward": attempt.reward}
    if attempt.status == "masked":
        result["mask_sample"] = True
    return {**result, **numbers}


def stored_attempts(path: Path) -> Iterator[Attempt]:
    """Yield rollouts that NeMo Gym collected, and lines of a run's rollouts. Raises `DataError` with path and line."""
    for line, value in read_values(path):
        yield Attempt.read(
            value if "row_key" in value else from_gym(_numbered(value, path, line), path, line), path, line
        )


def failures_beside(path: Path) -> Path:
    """The file of failed rollouts that NeMo Gym's collector writes beside one of rollouts."""
    return path.with_name(f"{path.stem}_failures.jsonl")


def inputs_beside(path: Path) -> Path:
    """The file of rows that NeMo Gym's collector writes beside one of rollouts."""
    return path.with_name(f"{path.stem}_materialized_inputs.jsonl")


def read_gym_failures(path: Path) -> Iterator[Attempt]:
    """Yield the failures in `NAME_failures.jsonl` beside a file of rollouts, but those that count as a score of 0.

    Yields nothing if there is no such file. A rollout may have several, and have succeeded later.
    """
    beside = failures_beside(path)
    for line, value in read_values(beside):
        if counts_as_zero(_numbered(value, beside, line)):
            continue
        error = {
            "kind": str(value.get("_ng_failure_class") or "unknown"),
            "type": str(value.get("_ng_failure_type") or "failure"),
            "message": str(value.get("_ng_failure_message") or value.get("failure_reason") or ""),
        }
        failed = {"status": "failed", "final": True, "error": error}
        yield Attempt.read({**_identifying_fields(value, beside, line), **failed}, beside, line)


def read_scored_failures(path: Path) -> Iterator[Attempt]:
    """Yield the failures beside a file of rollouts that NeMo Gym counts as a score of 0: they are no failed rollouts."""
    beside = failures_beside(path)
    for line, value in _last_failures(beside):
        if counts_as_zero(value):
            yield Attempt.read(from_gym(value, beside, line), beside, line)


def _last_failures(beside: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    """Return line and value of each rollout's last failure."""
    last = {}
    for line, value in read_values(beside):
        numbered = _numbered(value, beside, line)
        last[agent_of(value) or "", numbered[TASK], numbered[ROLLOUT]] = line, value
    return last.values()


def _numbered(value: dict[str, Any], path: Path, line: int) -> dict[str, Any]:
    if TASK not in value or ROLLOUT not in value:
        reason = (
            f"not a rollout of gymgate or of NeMo Gym's collector: it lacks row_key, or {TASK} and {ROLLOUT}"
        )
        if holds_traces(path):
            raise DataError(without_run(path), path=str(path))
        raise line_error(path, line, reason)
    for name in (TASK, ROLLOUT):
        if not isinstance(value[name], int):
            raise line_error(path, line, f"{name} must be a whole number, not {str(value[name])[:80]!r}")
    if not isinstance(value.get("agent_ref") or {}, Mapping):
        raise line_error(path, line, f"agent_ref must be an object, not {str(value['agent_ref'])[:80]!r}")
    return value


def from_gym(value: Mapping[str, Any], path: Path, line: int) -> dict[str, Any]:
    """One line of a run."""
    is_zero = counts_as_zero(value)
    message = None if is_zero else breakdown(value)
    reward = 0.0 if is_zero else value.get("reward")
    error = {"kind": "environment", "type": "EnvironmentServerError", "message": message}
    return {
        **_identifying_fields(value, path, line),
        "status": status_of(value) if message is None else "failed",
        "reward": reward if message is None else None,
        "reward_parts": reward_parts(value) if message is None else None,
        "error": None if message is None else error,
        "result": dict(value),
    }


def _identifying_fields(value: Mapping[str, Any], path: Path, line: int) -> dict[str, Any]:
    """Which rollout it is, of which task. The row itself is not there: a hash of the task's number stands for its key."""
    agent = agent_of(value) or ""
    return {
        "row_key": hashlib.sha256(f"{agent}\n{value[TASK]}".encode()).hexdigest()[:16],
        "occurrence": 0,
        "repeat": value[ROLLOUT],
        "seed": None,
        "task": value[TASK],
        "source": str(path),
        "line": value[TASK] + 1,
        "environment": agent,
        "agent": agent,
    }
