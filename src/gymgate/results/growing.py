"""The report of a run that may still be written, or not be there yet: read anew whenever the run's files changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gymgate.results.page import Part
from gymgate.results.report import report_parts, title_of
from gymgate.results.report_data import ReportData
from gymgate.runs.counted.aggregate import read_runs, runs_at
from gymgate.runs.stored.gym_rollouts import failures_beside
from gymgate.runs.stored.layout import FAILURES, ROLLOUTS, ROWS, RUN, run_directories, run_of_file

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
        path = run_of_file(self.path)
        if path.is_file():
            files = [path, failures_beside(path)]
        else:
            names = (RUN, ROWS, ROLLOUTS, FAILURES)
            files = [directory / name for directory in run_directories(path) for name in names]
        return {file: _file_stamp(file) for file in files}

    def parts(self) -> tuple[str, list[Part]]:
        """Return title and parts of the page.

        Raises `DataError` for a malformed line and `ConfigError` for shards of different policies.
        """
        waiting = {"note": f"Waiting for the first rollout of {self.path}."}
        if not runs_at(self.path):
            return str(self.path), [waiting]
        data = ReportData(self.tasks, self.per_task)
        table = read_runs([self.path], first_of_overlap=True, see=data.add, see_attempt=data.add_failure)
        progress = {"progress": {"done": table.tasks.counts.rollouts, "total": table.planned}}
        if not table.tasks.tasks:
            return str(self.path), [progress, waiting]
        # Rollouts that a run under way has yet to do are not missing; its shards that nobody started are.
        shown = replace(table, gaps=[])
        return title_of(table), [progress, *report_parts(shown, data)]


def _file_stamp(path: Path) -> FileStamp:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
