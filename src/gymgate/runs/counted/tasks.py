"""Rollouts grouped by task, and the little that is kept of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from gymgate.core.errors import ServerDiedError
from gymgate.rollouts.outcome import Outcome, failed_outcome
from gymgate.rollouts.row import TaskKey
from gymgate.runs.counted.costs import UsageCounts
from gymgate.runs.counted.counts import RolloutCounts
from gymgate.runs.described.plan import Order
from gymgate.runs.stored.attempts import task_name
from gymgate.runs.stored.score import Score

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


class TaskScore(NamedTuple):
    """What a task keeps of a rollout's score."""

    order: Order
    outcome: Outcome
    answer: str | None
    remark: str | None = None
    limit: str | None = None


class Failure(NamedTuple):
    """Why a rollout failed permanently."""

    kind: str
    cause: str
    """As it is counted."""


_NO_FAILURES: Mapping[Order, Failure] = MappingProxyType({})
"""One object for all tasks: an empty dict for each of a million takes 64 MB."""


@dataclass(slots=True)
class Task:
    """The rollouts of one row."""

    environment: str
    row_key: str
    occurrence: int
    agent: str
    task: int
    source: str
    line: int
    scores: list[TaskScore] = field(default_factory=list)
    """Of the rollouts that finished."""
    failures: Mapping[Order, Failure] = field(default_factory=lambda: _NO_FAILURES)
    """Rollouts that failed permanently."""
    failed_as: float | None = None
    """The reward that these count with; `None`: they are left out."""
    retries: int = 0
    """Calls that were made again."""
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

    def measured(self) -> list[TaskScore]:
        """Return the rollouts whose reward counts, in order."""
        counted = [score for score in self.scores if score.outcome.counted]
        if self.failed_as is not None:
            outcome = failed_outcome(self.failed_as)
            counted += (TaskScore(order, outcome, None) for order in self.failures)
        return sorted(counted, key=lambda score: score.order)

    def rewards(self) -> list[float]:
        return [reward for score in self.measured() if (reward := score.outcome.reward) is not None]


@dataclass
class CollectedTasks:
    """Rollouts by task, each counted once: those that were read, and those of a run under way."""

    tasks: dict[TaskKey, Task] = field(default_factory=dict)
    answer_keys: dict[str, str] = field(default_factory=dict)
    """By environment, the field of its results that holds the answer."""
    failed_as: float | None = None
    """The reward that rollouts which failed permanently count with; `None`: they are left out."""
    asked_again: Counter[TaskKey] = field(default_factory=Counter)
    """By task, failed attempts that were not their rollouts' end."""
    not_numbers: int = 0
    """Rewards that are not finite numbers."""
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    """All rollouts by outcome."""
    usage: UsageCounts = field(default_factory=UsageCounts)
    """Tokens of all rollouts, those of failed attempts included."""
    _scores: dict[TaskScore, TaskScore] = field(default_factory=dict)
    """Scores that tasks share: most of a million are equal to one of some hundred."""

    @property
    def broken_environments(self) -> set[str]:
        """Those with servers that failed a rollout, or died."""
        return {
            task.environment
            for task in self.tasks.values()
            for failure in task.failures.values()
            if failure.kind == "environment" or failure.cause.startswith(f"{ServerDiedError.__name__}:")
        }

    @property
    def mean_reward(self) -> float | None:
        """Mean of the rewards that count, those of failed rollouts included if they do; `None` without any."""
        counts = self.counts
        if self.failed_as is None or not counts.failed:
            return counts.mean_reward
        return (counts.reward_sum + counts.failed * self.failed_as) / (counts.scored + counts.failed)

    def ordered(self) -> list[Task]:
        return sorted(
            self.tasks.values(), key=lambda task: (task.environment, task.task, task.row_key, task.occurrence)
        )

    def add(self, score: Score) -> None:
        """Count a rollout that finished or failed permanently. One that failed before counts as it ended last."""
        self.usage.add(score.task.environment, score.tokens)
        task = self._task_of(score)
        if score.order in task.failures:
            failures = {**task.failures}
            self.counts.forget_failure(failures.pop(score.order).cause)
            task.failures = failures
            self.asked_again[score.task] += 1
        if score.outcome.reason == "failed":
            cause = self.counts.add(score.outcome, score.cause)
            task.failures = {**task.failures, score.order: Failure(score.failed_kind, cause)}
            return
        if score.answer_key is not None:
            self.answer_keys.setdefault(task.environment, score.answer_key)
        self.not_numbers += score.is_no_number
        self.counts.add(score.outcome, score.cause)
        kept = TaskScore(score.order, score.outcome, score.answer, score.remark, score.limit)
        task.scores.append(self._shared(kept))
        task.retries += score.retries or 0
        task.calls.add(score.calls)
        task.output_tokens.add(score.output_tokens)
        task.seconds.add(score.seconds)

    def add_attempt(self, score: Score) -> None:
        """Count a failed attempt that was not its rollout's end, and its tokens."""
        self.asked_again[score.task] += 1
        self.usage.add(score.task.environment, score.tokens)

    def count_failed_as(self, reward: float | None) -> None:
        """Count rollouts that failed permanently with a reward; `None`: leave them out."""
        self.failed_as = reward
        for task in self.tasks.values():
            task.failed_as = reward

    def _shared(self, score: TaskScore) -> TaskScore:
        """Return an equal score that is there already."""
        if len(self._scores) < _MOST_SHARED:
            return self._scores.setdefault(score, score)
        return self._scores.get(score, score)

    def _task_of(self, score: Score) -> Task:
        if (task := self.tasks.get(score.task)) is None:
            task = self.tasks[score.task] = Task(
                *score.task, score.agent, score.position, score.source, score.line, failed_as=self.failed_as
            )
        return task
