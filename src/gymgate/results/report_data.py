"""The content of a report, read in one pass: numbers of every rollout, conversations of a few tasks."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gymgate.core.config import POLICY
from gymgate.results.page import Part, conversation
from gymgate.rollouts import outcome_of
from gymgate.rollouts.transcript import opening
from gymgate.runs.tasks import TaskKey, calls_and_tokens, task_key

TIMES = ("waiting and set-up", "policy", "tools and agent", "judges", "scoring")
REWARD, CALLS, TOKENS, SECONDS = (
    "Reward",
    "Policy calls per rollout",
    "Sampled tokens per rollout",
    "Seconds per rollout",
)


@dataclass
class ReportData:
    """The data of the charts, the table of failures, and the conversations."""

    tasks: int
    """Tasks of which conversations are kept."""
    per_task: int
    """Finished rollouts of such a task that are kept, and as many failed ones."""
    charts: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in (REWARD, CALLS, TOKENS, SECONDS)}
    )
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    """Seconds of all rollouts, by what they were spent on."""
    openings: dict[TaskKey, str] = field(default_factory=dict)
    """The first words of each task."""
    shown: dict[TaskKey, list[Part]] = field(default_factory=dict)
    """What was said in rollouts, finished or failed permanently, by environment, row key and occurrence."""
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Failed attempts by class and error."""
    messages: dict[tuple[str, str], str] = field(default_factory=dict)
    """The first message of each."""

    def add(self, value: dict[str, Any]) -> None:
        """Add a rollout that finished or, after all of those, the last failure (`final`) of one that did not."""
        name = task_key(value)
        if name in self.shown or len(self.shown) < self.tasks:
            values = self.shown.setdefault(name, [])
            if len(values) < self.per_task * (2 if "final" in value else 1):
                label = _label(value)
                values.append({**conversation(value, label), "key": f"{'/'.join(map(str, name))} {label}"})
        if "final" in value:
            return
        if not self.openings.get(name):  # a rollout without a result has no words
            self.openings[name] = opening(value)
        if (reward := outcome_of(value).reward) is not None:
            self.charts[REWARD].append(reward)
        calls, tokens = calls_and_tokens(value)
        self.charts[CALLS].append(calls)
        self.charts[TOKENS].append(tokens)
        if (total := float((value.get("timing") or {}).get("total_s") or 0.0)) > 0:
            self.charts[SECONDS].append(total)
            for part, seconds in time_split(total, value.get("calls") or ()).items():
                self.times[part] += seconds

    def add_failure(self, attempt: Mapping[str, Any]) -> None:
        """Add a failed attempt."""
        error = attempt.get("error") or {}
        kind = (str(error.get("kind")), str(error.get("type")))
        self.failures[kind] += 1
        self.messages.setdefault(kind, str(error.get("message")))


def _label(value: Mapping[str, Any]) -> str:
    seed = "" if value.get("seed") is None else f" seed {value['seed']}"
    return f"repeat {value.get('repeat')}{seed}"


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
