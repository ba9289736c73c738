"""The report of a run that may still be written: each rollout is read once, when it is there."""

from __future__ import annotations

import copy
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

from gymgate.results.page import Part
from gymgate.results.report import report_parts, title_of
from gymgate.results.report_data import ReportData
from gymgate.runs.aggregate import Runs, add_failures, runs_at
from gymgate.runs.gym_rollouts import failures_beside
from gymgate.runs.layout import FAILURES, ROWS
from gymgate.runs.tasks import CollectedTasks

Stamp = tuple[int, int, int] | None


class GrowingReport:
    """A report of what has been read so far of the run at a path, where there may be none yet.

    Of duplicate rollouts, the first line counts. Failed attempts are read anew for each page.
    """

    def __init__(self, path: Path, *, tasks: int = 50, per_task: int = 4) -> None:
        """Show up to `per_task` conversations of each of the first `tasks` tasks."""
        self.path = path
        self.changes = 0
        """Another number whenever `parts` may be others."""
        self._bounds = tasks, per_task
        self._runs: Runs | None = None
        self._collected = CollectedTasks()
        self._data = ReportData(*self._bounds)
        self._rows: dict[Path, Stamp] = {}
        """Of files that are read once: another one asks for another reading."""
        self._failures: dict[Path, Stamp] = {}

    def read(self, until: float) -> bool:
        """Read what was appended, until a time as of `time.monotonic`; whether there may be more.

        Raises `DataError` for a malformed line and `ConfigError` for shards of different policies.
        """
        known = 0 if self._runs is None else len(self._runs.runs)
        if (
            self._runs is None
            or not self._runs.find_shards()
            or self._rows.items() - self._stamps(ROWS).items()
        ):
            self._start_over()
        if self._runs is None:
            return False
        self._rows = self._stamps(ROWS)
        self.changes += len(self._runs.runs) != known
        for attempt in self._runs.new_rollouts():
            self._collected.add(attempt)
            self._data.add(attempt)
            self.changes += 1
            if time.monotonic() > until:
                return True
        if (failures := self._stamps(FAILURES)) != self._failures:
            self._failures = failures
            self.changes += 1
        return False

    def parts(self) -> tuple[str, list[Part]]:
        """Return title and parts of the page. Raises `DataError` for a malformed line of a failed attempt."""
        waiting = {"note": f"Waiting for the first rollout of {self.path}."}
        runs, collected = self._runs, self._collected
        if runs is None:
            return str(self.path), [waiting]
        runs.take_notes()
        collected.forget_failures()
        conversations = {key: [*parts] for key, parts in self._data.conversations.items()}
        data = replace(
            self._data,
            conversations=conversations,
            places=[*self._data.places],
            failures=Counter(),
            messages={},
        )
        # A copy that shares the tasks: the tokens of failed attempts are added anew each time.
        collected = replace(
            collected, usage=copy.deepcopy(collected.usage), policy=runs.policy, created=runs.created
        )
        add_failures(runs, collected, data.add, data.add_failure)
        done = sum(len(task.scores) + task.failed for task in collected.tasks.values())
        progress = {"progress": {"done": done, "total": runs.planned}}
        if not collected.tasks:
            return str(self.path), [progress, waiting]
        return title_of(collected), [progress, *report_parts(runs, collected, data, ended=not runs.missing)]

    def _start_over(self) -> None:
        """Forget what was read: there is no run any more, or another one, or more is planned than was."""
        is_there = bool(runs_at(self.path))
        if self._runs is None and not is_there:
            return
        self._runs = Runs([self.path], first_of_overlap=True) if is_there else None
        self._collected, self._data = CollectedTasks(), ReportData(*self._bounds)
        self._failures = {}
        self.changes += 1

    def _stamps(self, name: str) -> dict[Path, Stamp]:
        """Return what differs between two states of the files of this name, or of what NeMo Gym writes next to a file."""
        stamps = {}
        for run in [] if self._runs is None else self._runs.runs:
            path = failures_beside(run.path) if run.is_file and name == FAILURES else run.path / name
            stamps[path] = _stamp(path)
        return stamps


def _stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
