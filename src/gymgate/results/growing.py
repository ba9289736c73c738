"""The report of a run that may still be written: each line is read once, when it is there."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gymgate.results.page import Part
from gymgate.results.report import report_parts, title_of
from gymgate.results.report_data import ReportData
from gymgate.runs.aggregate import Reading, RowName, Run, Runs, failed_attempts, note_gaps, row_name, runs_at
from gymgate.runs.costs import UsageCounts, tokens_of_line
from gymgate.runs.gym_rollouts import failures_beside
from gymgate.runs.plan import Identity
from gymgate.runs.record import LineReader, identity_of
from gymgate.runs.store import FAILURES, ROWS
from gymgate.runs.tasks import CollectedTasks, TaskKey

KEPT_RESULTS = 400
"""Failed rollouts of a run of which the result, as far as there is one, is kept for its conversation."""
Stamp = tuple[int, int, int] | None


class GrowingRuns(Runs):
    """A run with its shards, read on as it grows. Raises as `Runs` does.

    A rollout that is there twice is taken from its first line.
    """

    def __init__(self, path: Path) -> None:
        self._readings: list[Reading] = []
        self._failures: dict[Path, LineReader] = {}
        self._failures_of_file: dict[Path, Iterator[dict[str, Any]]] = {}
        self._final: defaultdict[Path, dict[Identity, dict[str, Any]]] = defaultdict(dict)
        """The first failure of each rollout that failed permanently, by run."""
        self._unplaced: list[tuple[Run, dict[str, Any]]] = []
        """Failed attempts of rows of which no rollout has finished, with what their tokens are counted by."""
        self._stamps: dict[Path, Stamp] = {}
        """Of files that are read once: another one asks for another reading."""
        self.complete = False
        """Whether every rollout is there or failed; current after `take_notes`."""
        super().__init__([path], first_of_overlap=True)

    @property
    def planned(self) -> int | None:
        """How many rollouts the run and the shards that were started have; `None` if one does not say."""
        totals: list[Any] = [run.extent.get("rollouts") for run in self.runs]
        return sum(totals) if all(isinstance(total, int) for total in totals) else None

    def find_shards(self) -> bool:
        """Find shards that were started since; false if what was read before is no longer what is there."""
        found = {run.path: run for run in runs_at(self.given[0])}
        readers = (*(reading.lines for reading in self._readings), *self._failures.values())
        if (
            any(found.pop(run.path, None) != run for run in self.runs)
            or any(reader.replaced for reader in readers)
            or any(_stamp(path) != stamp for path, stamp in self._stamps.items())
        ):
            return False
        for run in found.values():
            self._add(run)
        return True

    def new_rollouts(self) -> Iterator[dict[str, Any]]:
        """Yield the rollouts that finished since the last call."""
        for reading in self._readings:
            yield from self._unseen(reading)

    def new_attempts(self) -> Iterator[dict[str, Any]]:
        """Yield the attempts that failed since the last call."""
        for run in self.runs:
            final = self._final[run.path]
            of_file = self._failures_of_file.get(run.path)
            for value in of_file or failed_attempts(run.path, self._failures[run.path]):
                if value.get("final"):
                    left_out = ("calls",) if len(final) < KEPT_RESULTS else ("calls", "result")
                    kept = {name: field for name, field in value.items() if name not in left_out}
                    final.setdefault(identity_of(value), kept)
                names = ("row_key", "occurrence", "environment")
                placing: dict[str, Any] = {name: value[name] for name in names if name in value}
                self._unplaced.append((run, {**placing, "usage": tokens_of_line(value)}))
                yield value

    def add_usage(self, usage: UsageCounts) -> UsageCounts:
        """Add what failed attempts used, once the environment of their row is known; return a copy with all of them."""
        unplaced, self._unplaced = self._unplaced, []
        for run, value in unplaced:
            if environment := self._environments.get(row_name(run, value)):
                usage.add(environment, value["usage"])
            else:
                self._unplaced.append((run, value))
        whole = copy.deepcopy(usage)
        for _, value in self._unplaced:
            whole.add(str(value.get("environment", "")), value["usage"])
        return whole

    def take_notes(self) -> None:
        """Note what is lost, strange or there twice so far. A rollout that is not there yet is not missing."""
        self._clear_notes()
        for reading in self._readings:
            self._note(reading)
        self._note_whole()
        self.complete = not self.missing
        self.missing = [*self._missing_shards()]

    def _add(self, run: Run) -> None:
        super()._add(run)
        once = failures_beside(run.path) if run.path.is_file() else run.path / ROWS
        self._stamps[once] = _stamp(once)
        self._readings.append(Reading(run))
        if run.path.is_file():
            self._failures_of_file[run.path] = failed_attempts(run.path)
        else:
            self._failures[run.path] = LineReader(run.path / FAILURES)

    def _rows_that_failed(self) -> dict[RowName, str]:
        return {}  # any row may fail later

    def _name_environment(self, row: RowName, environment: str) -> None:
        self._environments[row] = environment

    def _final_failures(self, run: Run) -> Iterator[dict[str, Any]]:
        yield from self._final[run.path].values()


class GrowingReport:
    """A report of what has been read so far of the run at a path, where there may be none yet."""

    def __init__(self, path: Path, *, tasks: int = 50, per_task: int = 4) -> None:
        """Show up to `per_task` conversations of each of the first `tasks` tasks."""
        self.path = path
        self.changes = 0
        """Another number whenever `parts` may be others."""
        self._bounds = tasks, per_task
        self._runs: GrowingRuns | None = None
        self._collected = CollectedTasks()
        self._data = ReportData(*self._bounds)
        self._failed: set[TaskKey] = set()
        """Tasks whose failures are counted in `_collected`."""

    def read(self, until: float) -> bool:
        """Read what was appended, until a time as of `time.monotonic`; whether there may be more.

        Raises `DataError` for a malformed line and `ConfigError` for shards of different policies.
        """
        known = 0 if self._runs is None else len(self._runs.runs)
        if self._runs is None or not self._runs.find_shards():
            self._start_over()
        if self._runs is None:
            return False
        self.changes += len(self._runs.runs) != known
        for value in self._runs.new_rollouts():
            self._collected.add(value)
            self._data.add(value)
            self.changes += 1
            if time.monotonic() > until:
                return True
        for attempt in self._runs.new_attempts():
            self._data.add_failure(attempt)
            self.changes += 1
            if time.monotonic() > until:
                return True
        return False

    def parts(self) -> tuple[str, list[Part]]:
        """Return title and parts of the page."""
        waiting = {"note": f"Waiting for the first rollout of {self.path}."}
        runs = self._runs
        if runs is None:
            return str(self.path), [waiting]
        data = replace(self._data, shown={key: [*parts] for key, parts in self._data.shown.items()})
        self._count_failures(runs, data)
        runs.take_notes()
        usage = runs.add_usage(self._collected.usage)
        collected = replace(self._collected, usage=usage, policy=runs.policy, created=runs.created)
        note_gaps(runs, collected)
        done = sum(len(task.scores) + task.failed for task in collected.tasks.values())
        progress = {"progress": {"done": done, "total": runs.planned}}
        if not collected.tasks:
            return str(self.path), [progress, waiting]
        return title_of(collected), [progress, *report_parts(runs, collected, data, ended=runs.complete)]

    def _start_over(self) -> None:
        """Forget what was read: there is no run any more, or another one, or more is planned than was."""
        is_there = bool(runs_at(self.path))
        if self._runs is None and not is_there:
            return
        self._runs = GrowingRuns(self.path) if is_there else None
        self._collected, self._data = CollectedTasks(), ReportData(*self._bounds)
        self._failed.clear()
        self.changes += 1

    def _count_failures(self, runs: Runs, data: ReportData) -> None:
        """Count the rollouts that failed and have not finished since, in place of those that were counted before."""
        tasks = self._collected.tasks
        for key in self._failed:
            tasks[key].failed = 0
            if not tasks[key].scores:
                del tasks[key]
        self._failed.clear()
        for value in runs.failures():
            task = self._collected.task_of(value)
            task.failed += 1
            self._failed.add(task.key)
            data.add({"status": "failed", **value})


def _stamp(path: Path) -> Stamp:
    """Return what differs between two files, or two states of one, of this path."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
