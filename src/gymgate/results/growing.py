"""The report of a run that may still be written, or not be there yet: read anew whenever the run's files changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gymgate.results.page import Part
from gymgate.results.report import report_parts, title_of
from gymgate.results.report_data import ReportData
from gymgate.runs.aggregate import Runs, read_tasks, runs_at
from gymgate.runs.gym_rollouts import failures_beside
from gymgate.runs.layout import FAILURES, ROLLOUTS, ROWS, RUN, run_directories

FileStamp = tuple[int, int, int] | None
"""Inode, size and time of the last change; `None` if there is no such file."""


@dataclass(frozen=True)
class GrowingReport:
    """Makes the report of what is at a path now. Of duplicate rollouts, the first line counts."""

    path: Path
    tasks: int = 50
    per_task: int = 4
    """Conversations that are shown of each of the first `tasks` tasks."""

    def stamp(self) -> dict[Path, FileStamp]:
        """Return what differs between two states of the run's files. A stamp from before a reading never hides a later change."""
        if self.path.is_file():
            files = [self.path, failures_beside(self.path)]
        else:
            names = (RUN, ROWS, ROLLOUTS, FAILURES)
            files = [directory / name for directory in run_directories(self.path) for name in names]
        return {file: _file_stamp(file) for file in files}

    def parts(self) -> tuple[str, list[Part]]:
        """Return title and parts of the page.

        Raises `DataError` for a malformed line and `ConfigError` for shards of different policies.
        """
        waiting = {"note": f"Waiting for the first rollout of {self.path}."}
        if not runs_at(self.path):
            return str(self.path), [waiting]
        runs, data = Runs([self.path], first_of_overlap=True), ReportData(self.tasks, self.per_task)
        collected = read_tasks(runs, see=data.add, see_attempt=data.add_failure)
        # Rollouts that a run under way has yet to do are not missing; its shards that nobody started are.
        collected.missing = runs.missing_shards
        done = sum(len(task.scores) + task.failed for task in collected.tasks.values())
        progress = {"progress": {"done": done, "total": runs.planned}}
        if not collected.tasks:
            return str(self.path), [progress, waiting]
        return title_of(collected), [progress, *report_parts(runs, collected, data, ended=not runs.missing)]


def _file_stamp(path: Path) -> FileStamp:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
