"""Rollouts grouped by task, and the little that is kept of each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.rollouts.outcome import Outcome
from gymgate.rollouts.row import TaskKey
from gymgate.runs.attempts import ANSWER_KEYS, Attempt, Order, task_name
from gymgate.runs.costs import UsageCounts
from gymgate.runs.counts import RolloutCounts

_ANSWERS = frozenset(ANSWER_KEYS)
_LONGEST_ANSWER = 64
_MOST_SHARED = 1 << 14
"""Scores that are remembered to be shared; others are kept apart, so that a run of many different answers costs no index."""


@dataclass(slots=True)
class Known:
    """The mean of what is known."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        """Add a number; `None`: it is not known."""
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


class Score(NamedTuple):
    """The figures that are kept of one rollout."""

    order: Order
    outcome: Outcome
    answer: str | None


@dataclass(slots=True)
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
    """Of the rollouts that finished."""
    failures: frozenset[Order] = frozenset()
    """Rollouts that failed permanently."""
    calls: Known = field(default_factory=Known)
    output_tokens: Known = field(default_factory=Known)
    seconds: Known = field(default_factory=Known)

    @property
    def failed(self) -> int:
        return len(self.failures)

    @property
    def key(self) -> TaskKey:
        return TaskKey(self.environment, self.row_key, self.occurrence)

    @property
    def name(self) -> str:
        """`ENVIRONMENT:LINE` of the row's file, with `#2` and so on for further equal rows."""
        return task_name(self.environment, self.line, self.occurrence)

    def measured(self) -> list[Score]:
        """Return the rollouts whose reward counts, in order."""
        return sorted(
            (score for score in self.scores if score.outcome.counted), key=lambda score: score.order
        )

    def rewards(self) -> list[float]:
        return [reward for score in self.measured() if (reward := score.outcome.reward) is not None]


@dataclass
class CollectedTasks:
    """The rollouts of runs by task; `Runs` reads them, a run under way adds its own."""

    tasks: dict[TaskKey, Task] = field(default_factory=dict)
    answer_keys: dict[str, str] = field(default_factory=dict)
    """By environment, the field of its results that holds the answer."""
    missing: list[str] = field(default_factory=list)
    """Notes on runs, shards and rollouts that are not there."""
    lost: list[str] = field(default_factory=list)
    """Notes on rollouts that failed permanently."""
    strange: list[str] = field(default_factory=list)
    """Notes on rollouts that are in two runs, or in none's plan."""
    not_numbers: int = 0
    """Rewards that are not finite numbers."""
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    """All rollouts by outcome."""
    usage: UsageCounts = field(default_factory=UsageCounts)
    """Tokens of all rollouts, those of failed attempts included."""
    policy: Mapping[str, Any] | None = None
    """The policy in the settings of the runs; `None` for rollouts that NeMo Gym collected."""
    created: int | None = None
    """Start of the first run, in seconds since 1970."""
    _scores: dict[Score, Score] = field(default_factory=dict)
    """Scores that tasks share: most of a million are equal to one of some hundred."""

    @property
    def notes(self) -> list[str]:
        """Everything that a reader of the numbers has to know."""
        notes = [*self.strange, *self.lost, *self.missing]
        if self.not_numbers:
            notes.append(
                f"{self.not_numbers} rewards are not finite numbers (at most 1e100) and are counted as unscored"
            )
        return notes

    @property
    def replayed(self) -> bool:
        """Whether recorded rollouts answered for the policy."""
        return self.policy is not None and self.policy.get("type") == "replay"

    def ordered(self) -> list[Task]:
        return sorted(
            self.tasks.values(), key=lambda task: (task.environment, task.task, task.row_key, task.occurrence)
        )

    def add(self, attempt: Attempt, answer_key: str | None = None) -> None:
        """Add a rollout that finished; its answer is in `answer_key`, else in the first known field that it has."""
        task = self._task_of(attempt)
        result = attempt.result or {}
        keys = (answer_key,) if answer_key else ANSWER_KEYS if not _ANSWERS.isdisjoint(result) else ()
        if (key := next((key for key in keys if key in result), None)) is not None:
            self.answer_keys.setdefault(task.environment, key)
        self.not_numbers += attempt.is_no_number
        answer = None if key is None else short_answer(result[key])
        order, outcome = attempt.order, attempt.outcome
        task.scores.append(self._shared(Score(order, outcome, answer)))
        self.counts.add(outcome)
        if order in task.failures:
            task.failures -= {order}
            self.counts.outcomes["failed"] -= 1
        task.calls.add(attempt.call_count)
        task.output_tokens.add(attempt.output_tokens)
        task.seconds.add(attempt.seconds)
        self.usage.add(task.environment, attempt.tokens)

    def fail(self, attempt: Attempt) -> None:
        """Add a rollout that failed permanently."""
        task = self._task_of(attempt)
        self.counts.outcomes["failed"] += attempt.order not in task.failures
        task.failures |= {attempt.order}

    def _shared(self, score: Score) -> Score:
        """Return an equal score that is there already."""
        if len(self._scores) < _MOST_SHARED:
            return self._scores.setdefault(score, score)
        return self._scores.get(score, score)

    def _task_of(self, attempt: Attempt) -> Task:
        if (task := self.tasks.get(attempt.task_key)) is None:
            environment, row_key, occurrence = attempt.task_key
            task = self.tasks[attempt.task_key] = Task(
                environment=environment,
                agent=attempt.agent,
                row_key=row_key,
                occurrence=occurrence,
                task=attempt.task,
                source=attempt.source,
                line=attempt.line,
            )
        return task


def short_answer(value: Any) -> str | None:
    """Return an answer as a short text; equal answers stay equal."""
    if value is None:
        return None
    text = value if isinstance(value, str) else codec.dumps(value, sort_keys=True).decode()
    return text if len(text) <= _LONGEST_ANSWER else hashlib.sha256(text.encode()).hexdigest()
