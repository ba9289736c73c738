"""The content of a report, read in one pass: numbers of every rollout, conversations of a few tasks."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gymgate.collection.aggregate import Runs
from gymgate.collection.tasks import calls_and_tokens, task_name
from gymgate.config import POLICY
from gymgate.rollout import outcome_of

TIMES = ("waiting and set-up", "policy", "tools and agent", "judges", "scoring")


@dataclass
class ReportData:
    """The data of the charts, the table of failures and the conversations."""

    rewards: array[float] = field(default_factory=lambda: array("d"))
    calls: array[float] = field(default_factory=lambda: array("d"))
    tokens: array[float] = field(default_factory=lambda: array("d"))
    seconds: array[float] = field(default_factory=lambda: array("d"))
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    """Seconds of all rollouts, by what they were spent on."""
    shown: dict[tuple[str, str, int], list[dict[str, Any]]] = field(default_factory=dict)
    """Lines of rollouts, finished or failed for good, by environment, row key and occurrence."""
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Failed attempts by class and error."""
    messages: dict[tuple[str, str], str] = field(default_factory=dict)
    """The first message of each."""

    def show(self, value: dict[str, Any], tasks: int, per_task: int) -> None:
        """Keep a rollout if it is one of the first `per_task` of the first `tasks` tasks."""
        name = task_name(value)
        if name in self.shown or len(self.shown) < tasks:
            shown = self.shown.setdefault(name, [])
            if len(shown) < per_task:
                shown.append(value)


def gather(runs: Runs, tasks: int, per_task: int) -> ReportData:
    """Read runs for a report.

    Of each of the first `tasks` tasks, up to `per_task` finished rollouts are kept, and as many failed ones.
    """
    data = ReportData()
    for value in runs.rollouts():
        if (reward := outcome_of(value).reward) is not None:
            data.rewards.append(reward)
        calls, tokens = calls_and_tokens(value)
        data.calls.append(calls)
        data.tokens.append(tokens)
        if (total := float((value.get("timing") or {}).get("total_s") or 0.0)) > 0:
            data.seconds.append(total)
            for name, seconds in time_split(total, value.get("calls") or ()).items():
                data.times[name] += seconds
        data.show(value, tasks, per_task)
    for failure in runs.failures():
        data.show({"status": "failed", **failure}, tasks, 2 * per_task)
    for attempt in runs.failed_attempts():
        error = attempt.get("error") or {}
        kind = (str(error.get("kind")), str(error.get("type")))
        data.failures[kind] += 1
        data.messages.setdefault(kind, str(error.get("message")))
    return data


def time_split(total_s: float, calls: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Divide a rollout's seconds by what they were spent on; where calls overlap, the earlier one counts."""
    split = dict.fromkeys(TIMES, 0.0)
    reached, between = 0.0, "waiting and set-up"
    for call in sorted(calls, key=lambda call: float(call.get("started_s") or 0.0)):
        start = min(float(call.get("started_s") or 0.0), total_s)
        end = min(start + float(call.get("duration_s") or 0.0), total_s)
        split[between] += max(0.0, start - reached)
        kind = "policy" if call.get("model_server") == POLICY else "judges"
        split[kind] += max(0.0, end - max(start, reached))
        reached, between = max(reached, end), "tools and agent"
    split["scoring" if between != "waiting and set-up" else between] += max(0.0, total_s - reached)
    return split
