"""Rollouts grouped by task, and the little that is kept of each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.config import POLICY
from gymgate.rollouts.outcome import Outcome, outcome_of
from gymgate.rollouts.result import number
from gymgate.runs.costs import UsageCounts, tokens_of, tokens_of_line
from gymgate.runs.record import CollectedRollout

ANSWER_KEYS = (
    "extracted_answer",
    "predicted_answer",
    "predicted_value",
    "extracted_label",
    "extracted_model_code",
    "extracted_code",
    "extracted_sql",
    "extracted_verdict",
    "extracted_judgement",
    "extracted_grade",
)
"""Fields of a result in which NeMo Gym's environments put the answer; the first that is there is taken."""
_LONGEST_ANSWER = 64


TaskKey = tuple[str, str, int]
"""Environment, row key and occurrence: what the rollouts of a task have in common."""


class Score(NamedTuple):
    """The figures that are kept of one rollout."""

    order: tuple[int, int]
    """Seed and repeat."""
    outcome: Outcome
    answer: str | None


@dataclass
class Task:
    """The rollouts of one row."""

    environment: str
    agent: str
    row_key: str
    occurrence: int
    task: int
    source: str
    line: int
    scores: list[Score] = field(default_factory=list)
    failed: int = 0
    calls: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def key(self) -> TaskKey:
        return self.environment, self.row_key, self.occurrence

    @property
    def name(self) -> str:
        """`ENVIRONMENT:LINE` of the row's file, with `#2` and so on for further equal rows."""
        return f"{self.environment}:{self.line}{f'#{self.occurrence + 1}' if self.occurrence else ''}"

    def measured(self) -> list[Score]:
        """Return the rollouts whose reward counts, in order."""
        return sorted(
            (score for score in self.scores if score.outcome.counted), key=lambda score: score.order
        )

    def rewards(self) -> list[float]:
        return [reward for score in self.measured() if (reward := score.outcome.reward) is not None]


@dataclass
class CollectedTasks:
    """The tasks of one or several runs."""

    tasks: dict[TaskKey, Task] = field(default_factory=dict)
    answer_keys: dict[str, str] = field(default_factory=dict)
    """Environment -> field of its results that holds the answer, where there is one."""
    notes: list[str] = field(default_factory=list)
    """Notes for a reader of the metrics: missing rollouts, rewards that are not numbers."""
    missing: list[str] = field(default_factory=list)
    """The notes that name missing rollouts or shards."""
    lost: list[str] = field(default_factory=list)
    """The notes that say how many rollouts failed permanently."""
    not_numbers: int = 0
    usage: UsageCounts = field(default_factory=UsageCounts)
    """Tokens of all rollouts, those of failed attempts included."""
    policy: Mapping[str, Any] | None = None
    """The policy in the settings of the runs; `None` for rollouts that NeMo Gym collected."""
    created: int | None = None
    """Start of the first run, in seconds since 1970."""

    @property
    def replayed(self) -> bool:
        """Whether recorded rollouts answered for the policy."""
        return self.policy is not None and self.policy.get("type") == "replay"

    def ordered(self) -> list[Task]:
        return sorted(
            self.tasks.values(), key=lambda task: (task.environment, task.task, task.row_key, task.occurrence)
        )

    def add(self, value: Mapping[str, Any], answer_key: str | None = None) -> None:
        """Add a line of a run's rollouts; its answer is in `answer_key`, else in the first known field that it has."""
        task = self.task_of(value)
        result = value.get("result") or {}
        keys = (answer_key,) if answer_key else ANSWER_KEYS
        if (key := next((key for key in keys if key in result), None)) is not None:
            self.answer_keys.setdefault(task.environment, key)
        if (given := value.get("reward")) is not None and number(given) is None:
            self.not_numbers += 1
        order = value.get("seed") or 0, int(value.get("repeat", 0))
        task.scores.append(
            Score(order, outcome_of(value), short_answer(result[key]) if key is not None else None)
        )
        calls, tokens = calls_and_tokens(value)
        task.calls += calls
        task.output_tokens += tokens
        task.seconds += (value.get("timing") or {}).get("total_s") or 0.0
        self.usage.add(task.environment, tokens_of_line(value))

    def add_rollout(self, rollout: CollectedRollout) -> None:
        """Add a rollout that finished or failed permanently; of its calls only the tokens are counted."""
        self.add({**vars(rollout), "calls": (), "timing": None, "usage": tokens_of(rollout)})

    def task_of(self, value: Mapping[str, Any]) -> Task:
        """The task that a line of a run belongs to."""
        key = task_key(value)
        if key not in self.tasks:
            environment, row_key, occurrence = key
            self.tasks[key] = Task(
                environment=environment,
                agent=str(value.get("agent", "")),
                row_key=row_key,
                occurrence=occurrence,
                task=int(value.get("task", 0)),
                source=str(value.get("source", "")),
                line=int(value.get("line", 0)),
            )
        return self.tasks[key]


def task_key(value: Mapping[str, Any]) -> TaskKey:
    """Return the key of the task that a line of a run belongs to."""
    return str(value.get("environment", "")), str(value["row_key"]), int(value.get("occurrence", 0))


def calls_and_tokens(value: Mapping[str, Any]) -> tuple[int, int]:
    """Number of policy calls of a rollout's line, and tokens that they sampled."""
    calls = [call for call in value.get("calls") or () if call.get("model_server") == POLICY]
    return len(calls), sum((call.get("usage") or {}).get("output_tokens") or 0 for call in calls)


def short_answer(value: Any) -> str | None:
    """Return an answer as a short text; equal answers stay equal."""
    if value is None:
        return None
    text = value if isinstance(value, str) else codec.dumps(value, sort_keys=True).decode()
    return text if len(text) <= _LONGEST_ANSWER else hashlib.sha256(text.encode()).hexdigest()
