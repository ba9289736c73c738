"""A pytest plugin: what a session ran and what it cost, by file, for the summary of `./dev test`.

CPU time is that of the tests' processes and of the processes that they waited for.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

REPORT = "GYMGATE_TEST_REPORT"
"""Variable with the path of the report to write."""


class Accounting:
    """Measures every phase of a test where it runs, and adds up where the reports arrive."""

    def __init__(self, report: Path | None) -> None:
        self._report = report
        self._since = (time.monotonic(), cpu_s())
        self._outcomes: dict[str, str] = {}
        self._deselected = 0
        self._files: defaultdict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "cpu": 0.0})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._since = (time.monotonic(), cpu_s())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report: Any = yield
        now = (time.monotonic(), cpu_s())
        report.gymgate_cost = [after - before for after, before in zip(now, self._since, strict=True)]
        self._since = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, file = report.nodeid, self._files[report.nodeid.partition("::")[0]]
        seconds, cpu = getattr(report, "gymgate_cost", (0.0, 0.0))
        file["seconds"] += seconds
        file["cpu"] += cpu
        if (report.when == "call" or report.outcome != "passed") and self._outcomes.get(name) != "failed":
            self._outcomes[name] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._deselected += len(items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker of xdist, each of which selects among all tests, left out."""
        self._deselected = getattr(node, "workeroutput", {}).get("deselected", self._deselected)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["deselected"] = self._deselected
        if self._report is not None:
            counts = dict(Counter(self._outcomes.values()))
            found = {"counts": counts, "files": self._files, "deselected": self._deselected}
            self._report.write_text(json.dumps(found))


def cpu_s() -> float:
    """Return the CPU time of this process and of those that it waited for."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def register(config: pytest.Config) -> None:
    """Measure the session; write the report in the process that started it, not in its xdist workers."""
    path = None if hasattr(config, "workerinput") else os.environ.get(REPORT)
    config.pluginmanager.register(Accounting(Path(path) if path else None), "gymgate-accounting")
