"""What the score of some tasks is made of: every rollout in exactly one part. All tables, reports and exports read it here."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gymgate.rollouts import Outcome
from gymgate.runs.counted.counts import RolloutCounts
from gymgate.runs.counted.tasks import CollectedTasks, Task
from gymgate.runs.stored.score import NO_ANSWER, UNREAD

Part = Literal["failed", "masked", "unscored", "right", "cut off", "no answer found", "wrong"]
MOST_VALUES = 4
"""Different rewards that are counted one by one; more are described by their range."""
SHOWN_CAUSES = 3
SHOWN_TASKS = 3
"""Causes of failures, and tasks of one, that a note names."""


def part_of(outcome: Outcome, remark: str | None = None) -> Part:
    """Return what a rollout counts as: the first part that fits. `remark` is that of its score."""
    if outcome.reason in ("failed", "masked", "unscored"):
        return outcome.reason
    if outcome.reward is not None and outcome.reward >= 1:
        return "right"
    if remark not in (None, NO_ANSWER, UNREAD):  # the model's own failure
        return "wrong"
    if outcome.reason != "completed":
        return "cut off"
    return "no answer found" if remark == NO_ANSWER else "wrong"


@dataclass
class Account:
    """The rollouts of some tasks by part. As text: one line."""

    counts: RolloutCounts = field(default_factory=RolloutCounts)
    parts: Counter[Part] = field(default_factory=Counter)
    rewards: Counter[float] = field(default_factory=Counter)
    """Those of rollouts that are right or wrong."""
    least: float = 0.0
    most: float = 0.0
    """Of all rewards that count, and 0."""
    is_binary: bool = True
    """Whether all rewards that count are 0 or 1."""
    own_failures: Counter[str] = field(default_factory=Counter)
    """Failures of the model's own, which count as wrong, by kind."""
    limits: Counter[str] = field(default_factory=Counter)
    """Rollouts that are cut off, by the limit that ended them, where it is known."""
    failures: Counter[str] = field(default_factory=Counter)
    """Rollouts that failed, by kind."""
    failed_as: float | None = None
    """The reward that these count with; `None`: they are left out."""
    asked_again: int = 0
    """Failed attempts that were not their rollouts' end."""
    retried_calls: int = 0

    @classmethod
    def of(cls, tasks: Iterable[Task], collected: CollectedTasks) -> Account:
        """Count the rollouts of some of the tasks."""
        account = cls(failed_as=collected.failed_as)
        for task in tasks:
            account.asked_again += collected.asked_again[task.key]
            account.retried_calls += task.retries
            account.failures.update(failure.kind for failure in task.failures.values())
            for score in task.scores:
                account._add(score.outcome, score.remark, score.limit)
        account.parts["failed"] = account.counts.outcomes["failed"] = account.failures.total()
        return account

    def _add(self, outcome: Outcome, remark: str | None, limit: str | None) -> None:
        self.counts.add(outcome)
        part = part_of(outcome, remark)
        self.parts[part] += 1
        if part == "cut off" and limit is not None:
            self.limits[limit] += 1
        if (reward := outcome.reward) is None:
            return
        self.least, self.most = min(self.least, reward), max(self.most, reward)
        self.is_binary &= reward in (0, 1)
        if part in ("right", "wrong"):
            self.rewards[reward] += 1
        if part == "wrong" and remark is not None:
            self.own_failures[remark] += 1

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The mean reward if the failed rollouts had got 0, and 1; `None` without any, and where rewards lie elsewhere."""
        failed, scored, total = self.parts["failed"], self.counts.scored, self.counts.reward_sum
        if not failed or not scored or self.least < 0 or self.most > 1 or self.failed_as is not None:
            return None
        return total / (scored + failed), (total + failed) / (scored + failed)

    def columns(self) -> dict[str, Any]:
        """Return the account by the names that it has in tables, files and `--json`."""
        low, high = self.bounds or (None, None)
        return {
            **self.counts.columns(),
            "right": self.parts["right"] if self.is_binary else None,
            "wrong": self.parts["wrong"] if self.is_binary else None,
            "cut_off": self.parts["cut off"],
            "no_answer": self.parts["no answer found"],
            "asked_again": self.asked_again,
            "retried_calls": self.retried_calls,
            "mean_if_failed_0": low,
            "mean_if_failed_1": high,
        }

    def __str__(self) -> str:
        """`22 rollouts: 7 right, 9 wrong, 1 cut off; 2 failed (1 by judge, 1 by policy), asked again 4 times`."""
        count = self.parts.total()
        text = f"{count} rollout{'s' * (count != 1)}: {', '.join(self._scored_parts()) or 'none scored'}"
        later = list(self._other_parts())
        return "; ".join([text, ", ".join(later)]) if later else text

    def _scored_parts(self) -> Iterator[str]:
        if self.is_binary:
            if self.counts.scored:
                yield f"{self.parts['right']} right"
                yield f"{self.parts['wrong']} wrong{_kinds(self.own_failures)}"
        elif self.rewards:
            yield _distribution(self.rewards)
        names: tuple[Part, ...] = ("no answer found", "cut off", "unscored", "masked")
        kinds = {"cut off": _kinds(self.limits)}
        yield from (f"{self.parts[name]} {name}{kinds.get(name, '')}" for name in names if self.parts[name])

    def _other_parts(self) -> Iterator[str]:
        if failed := self.parts["failed"]:
            counted = "" if self.failed_as is None else f" and counted as {self.failed_as:g}"
            yield f"{failed} failed{counted}{_kinds(self.failures)}"
        if again := self.asked_again:
            yield f"asked again {again} time{'s' * (again != 1)}"
        if calls := self.retried_calls:
            yield f"{calls} call{'s' * (calls != 1)} retried"


def _kinds(counts: Mapping[str, int]) -> str:
    """` (2 by policy, 1 by judge)`, or nothing without any."""
    kinds = sorted(counts.items(), key=lambda it: (-it[1], it[0]))
    return f" ({', '.join(f'{count} by {kind}' for kind, count in kinds)})" if kinds else ""


def _distribution(rewards: Counter[float]) -> str:
    """Return how often each reward was given or, of many, their range and median."""
    ordered = sorted(rewards)
    count = rewards.total()
    if len(ordered) <= MOST_VALUES:
        return ", ".join(f"{rewards[reward]} with reward {reward:g}" for reward in ordered)
    median = statistics.median(rewards.elements())
    return f"{count} with rewards {ordered[0]:.3g} to {ordered[-1]:.3g}, median {median:.3g}"


def notes_on(collected: CollectedTasks) -> Iterator[str]:
    """Say what a reader of the numbers has to know: rewards that are none or lie beyond 0 and 1, why rollouts failed or were
    masked, the most frequent reasons first, and which tasks failed in every repeat."""
    if collected.failed_as is not None:
        yield f"rollouts that failed count as {collected.failed_as:g} (--failed-as)"
    if collected.not_numbers:
        yield f"{collected.not_numbers} rewards are not finite numbers (at most 1e100) and are counted as unscored"
    lost: dict[str, list[Task]] = {}
    beyond: dict[str, float] = {}
    unread = Counter[str]()
    for task in collected.ordered():
        unread[task.environment] += sum(score.remark == UNREAD for score in task.scores)
        why = {failure.cause for failure in task.failures.values()}
        if not task.scores and len(why) == 1:
            lost.setdefault(why.pop(), []).append(task)
        for reward in task.rewards():
            if not 0 <= reward <= 1:
                beyond.setdefault(task.environment, reward)
    for environment, reward in beyond.items():
        yield f"{environment}: rewards lie beyond 0 and 1 (e.g. {reward:g}), so mean and pass@k are no shares of right answers"
    for environment, count in (+unread).items():
        yield (
            f"{environment}: {count} rewards are 0 since math_verify read nothing in the box, as when its time is up on a busy "
            "machine; gymgate rescore at a lower -c, or --set ...library_verifier_max_concurrency=2, shows it"
        )
    causes = collected.counts.causes
    for cause, count in causes.most_common(SHOWN_CAUSES):
        tasks = lost.get(cause, ())
        yield f"{count} x {cause}{f'; in every repeat of {_named(tasks)}' if tasks else ''}"
    if len(causes) > SHOWN_CAUSES:
        yield f"and {len(causes) - SHOWN_CAUSES} more reasons"


def _named(tasks: Sequence[Task]) -> str:
    names = ", ".join(task.name for task in tasks[:SHOWN_TASKS])
    return names if len(tasks) <= SHOWN_TASKS else f"{names} and {len(tasks) - SHOWN_TASKS} more tasks"
