"""NeMo Gym's own form of collected rollouts: the lines of its rollouts.jsonl and materialized inputs, both ways."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from gymgate.collection.record import read_values
from gymgate.collection.store import ROLLOUTS, run_directories
from gymgate.dataset import open_rows
from gymgate.errors import DataError
from gymgate.rollout.breakdowns import breakdown
from gymgate.rollout.outcome import outcome_of
from gymgate.rollout.result import status_of

TASK, ROLLOUT = "_ng_task_index", "_ng_rollout_index"


def export_rollouts(runs: Iterable[Path], output: Path) -> int:
    """Write finished rollouts as NeMo Gym's collector does, and the inputs that its profiler wants beside them
    (`NAME_materialized_inputs.jsonl`); how many. Raises `DataError` if a row's file has changed since."""
    inputs = output.with_name(f"{output.stem}_materialized_inputs.jsonl")
    rows = _RowReader()
    count = 0
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("wb") as results, inputs.open("wb") as materialized:
            for result, row in _numbered(runs, rows):
                results.write(orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE))
                materialized.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
                count += 1
    except OSError as error:
        raise DataError(f"cannot write {output}: {error.strerror}", path=str(output)) from error
    return count


def _numbered(runs: Iterable[Path], rows: _RowReader) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Results and inputs with NeMo Gym's numbers for tasks, and for the rollouts of a task (by seed and repeat)."""
    directories = [found for path in runs for found in run_directories(path)]
    tasks: dict[tuple[str, str, int], int] = {}
    attempts = sorted(
        {
            (value.get("seed") or 0, value["repeat"])
            for directory in directories
            for _, value in read_values(directory / ROLLOUTS)
        }
    )
    for directory in directories:
        for _, value in read_values(directory / ROLLOUTS):
            name = (value["environment"], value["row_key"], value["occurrence"])
            numbers = {
                TASK: tasks.setdefault(name, len(tasks)),
                ROLLOUT: attempts.index((value.get("seed") or 0, value["repeat"])),
                "agent_ref": {"type": "responses_api_agents", "name": value["agent"]},
            }
            row = rows.read(value["source"], value["line"], value["row_key"])
            yield to_gym(value, numbers), {**row, **numbers}


def to_gym(value: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """One line of NeMo Gym's rollouts.jsonl."""
    result = dict(value.get("result") or {})
    result["reward"] = value.get("reward")
    if outcome_of(value).reason == "masked":
        result["mask_sample"] = True
    return {**result, **numbers}


def read_gym_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """Rollouts that NeMo Gym collected, as lines of a run. Raises `DataError` with path and line."""
    for line, value in _numbered_lines(path):
        yield from_gym(value, path, line)


def read_gym_failures(path: Path) -> Iterator[dict[str, Any]]:
    """The last failure of each rollout that NeMo Gym noted beside a file of rollouts (`NAME_failures.jsonl`), as lines
    of a run's failures; nothing if there is no such file. Those of rollouts that succeeded later are among them."""
    beside = path.with_name(f"{path.stem}_failures.jsonl")
    last = {
        (_agent(value), value[TASK], value[ROLLOUT]): (line, value) for line, value in _numbered_lines(beside)
    }
    for line, value in last.values():
        error = {
            "kind": str(value.get("_ng_failure_class") or "unknown"),
            "type": str(value.get("_ng_failure_type") or "failure"),
            "message": str(value.get("_ng_failure_message") or value.get("failure_reason") or ""),
        }
        yield {**_place(value, beside, line), "final": True, "error": error}


def _numbered_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, value in read_values(path):
        if TASK not in value or ROLLOUT not in value:
            raise DataError(
                f"{path}:{line}: not one of NeMo Gym's rollouts: it has no {TASK} or no {ROLLOUT}",
                path=str(path),
                line=line,
            )
        yield line, value


def from_gym(value: Mapping[str, Any], path: Path, line: int) -> dict[str, Any]:
    """One line of a run; its row's key stands for the task's number, since the row itself is not there."""
    told = breakdown(value)
    error = {"kind": "environment", "type": "EnvironmentServerError", "message": told}
    return {
        **_place(value, path, line),
        "status": status_of(value) if told is None else "failed",
        "reward": value.get("reward") if told is None else None,
        "error": None if told is None else error,
        "result": dict(value),
        "calls": [],
    }


def _place(value: Mapping[str, Any], path: Path, line: int) -> dict[str, Any]:
    """Which rollout it is, and of what."""
    agent = _agent(value)
    return {
        "row_key": hashlib.sha256(f"{agent}\n{value[TASK]}".encode()).hexdigest()[:16],
        "occurrence": 0,
        "repeat": value[ROLLOUT],
        "seed": None,
        "task": value[TASK],
        "source": str(path),
        "line": line,
        "environment": agent,
        "agent": agent,
    }


def _agent(value: Mapping[str, Any]) -> str:
    """Rows that a taskset made name no agent but the environment server in front of it."""
    return str((value.get("agent_ref") or {}).get("name") or value.get("_ng_environment_server") or "")


class _RowReader:
    """Rows by file and line; each file's index is opened once."""

    def __init__(self) -> None:
        self._positions: dict[str, tuple[Any, dict[int, int]]] = {}

    def read(self, source: str, line: int, key: str) -> dict[str, Any]:
        if source not in self._positions:
            rows = open_rows(source, environment=None)
            self._positions[source] = rows, {}
        rows, known = self._positions[source]
        position = known.get(line)
        if position is None:
            position = known[line] = _position_of(rows, line)
        row = rows[position]
        if row.key != key:
            raise DataError(f"{source}:{line} is not the row that was run", path=source, line=line)
        return dict(row.data)


def _position_of(rows: Any, line: int) -> int:
    """Of a line among the rows; blank lines before it make it come sooner."""
    low, high = 0, min(line, len(rows)) - 1
    while low < high:
        middle = (low + high) // 2
        if rows[middle].line < line:
            low = middle + 1
        else:
            high = middle
    return low
