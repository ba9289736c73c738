"""The input rows of rollouts, read again from their files."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any

from gymgate.core.errors import ConfigError, DataError
from gymgate.gym.row_sources import open_rows
from gymgate.rollouts.row import Row, TaskKey
from gymgate.runs.stored.record import CollectedRollout


class RowReader:
    """Reads rows by file and task. Of each file, the positions of its rows are kept."""

    def __init__(self, datasets: Collection[str] = ()) -> None:
        """`datasets` are those that the user gave: no other is fetched or loaded, whatever a run names as its source."""
        self._datasets = datasets
        self._opened: dict[str, _OpenedRows] = {}
        self._lost = set[str]()
        """What could not be opened."""

    def read(self, source: str, task: TaskKey, line: int) -> dict[str, Any]:
        """Return the row of a task, which stood in this line when it was run.

        Equal rows may differ in `_ng_*` entries, which their keys leave out. Of several, the one in the line is taken, else
        the one that has as many before it. Raises `DataError` if the file has changed or is gone, and `ConfigError` for a
        dataset that was not given.
        """
        if source not in self._opened:
            is_dataset = source.startswith("hf:") or Path(source).expanduser().is_dir()
            if is_dataset and source not in self._datasets:
                raise ConfigError(
                    f"the rows come from the dataset {source}, as the run says; give --dataset {shlex.quote(source)} to load it"
                )
            self._opened[source] = _OpenedRows(source)
        equal = self._opened[source].equal_rows(task.row_key)
        if not equal:
            raise DataError(
                f"{source} has changed: row {task.row_key} is not there; put the former file back",
                path=source,
            )
        by_line = next((row for row in equal if row.line == line), None)
        return (by_line or equal[min(task.occurrence, len(equal) - 1)]).data

    def read_if_there(self, rollout: CollectedRollout) -> dict[str, Any]:
        """Return the row of a rollout; empty if it cannot be read again: its file may be gone, or another user's."""
        if rollout.source in self._lost:
            return {}
        try:
            return self.read(rollout.source, rollout.task_key, rollout.line)
        except (ConfigError, DataError, OSError, RuntimeError):
            if rollout.source not in self._opened:
                self._lost.add(rollout.source)
            return {}


class _OpenedRows:
    def __init__(self, source: str) -> None:
        self._rows = open_rows(source, environment=None)
        self._first: dict[str, int] = {}
        """By key, the position of its first row."""
        self._further: defaultdict[str, list[int]] = defaultdict(list)
        """Positions of rows that equal an earlier one: few rows of a million do."""
        for position in range(len(self._rows)):
            try:
                key = self._rows[position].key
            except DataError as error:
                if error.line is None:  # the file itself cannot be read
                    raise
                continue
            if self._first.setdefault(key, position) != position:
                self._further[key].append(position)

    def equal_rows(self, key: str) -> list[Row]:
        """Return the rows with a key, in their order."""
        first = [self._first[key]] if key in self._first else []
        return [self._rows[position] for position in (*first, *self._further.get(key, ()))]
