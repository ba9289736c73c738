"""The content of a report, read in one pass: numbers of every rollout, conversations of a few tasks."""

from __future__ import annotations

import bisect
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gymgate.core.config import POLICY
from gymgate.results.page import Part, conversation, shown_answer
from gymgate.rollouts.row import TaskKey
from gymgate.rollouts.transcript import cut, opening
from gymgate.runs.counted.tasks import Task
from gymgate.runs.described.plan import Order
from gymgate.runs.stored.attempts import Attempt, StoredError
from gymgate.runs.stored.score import Score, expected_answer
from gymgate.runs.stored.tokens import Calls

LONGEST_OPENING = 400
"""Characters that are kept of a task's first words, so that what the tasks of an environment have in common can be left out."""
LONGEST_NAME = 80
TIMES = ("waiting and set-up", "policy", "tools and agent", "judges", "scoring")
REWARD, CALLS, TOKENS, SECONDS = (
    "Reward",
    "Policy calls per rollout",
    "Sampled tokens per rollout",
    "Seconds per rollout",
)


class RolloutPart(NamedTuple):
    """What was said in a rollout, which finished or failed permanently."""

    order: Order
    has_failed: bool
    part: Part


@dataclass
class ReportData:
    """The data of the charts, the table of failures, and the conversations."""

    tasks: int
    """Tasks of which conversations are kept: those whose rows come first in their files, whatever finished first."""
    per_task: int
    """Finished rollouts of such a task that are kept, and as many failed ones: the first by seed and repeat."""
    charts: dict[str, array[float]] = field(
        default_factory=lambda: {name: array("d") for name in (REWARD, CALLS, TOKENS, SECONDS)}
    )
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMES, 0.0))
    """Seconds of all rollouts, by what they were spent on."""
    openings: dict[TaskKey, str] = field(default_factory=dict)
    """The first words of each task; `task_names` makes names of them."""
    expected: dict[TaskKey, str] = field(default_factory=dict)
    """The right answer of each task that says it."""
    conversations: dict[TaskKey, list[RolloutPart]] = field(default_factory=dict)
    """Those of a task by seed and repeat."""
    places: list[tuple[int, TaskKey]] = field(default_factory=list)
    """The lines and keys of these tasks, in order."""
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Failed attempts by class and error."""
    messages: dict[tuple[str, str], str] = field(default_factory=dict)
    """The first message of each."""

    def add(self, attempt: Attempt, score: Score) -> None:
        """Add a rollout that finished or, after all of those, one that failed permanently."""
        name = score.task
        if self._has_place(score):
            self._keep_conversation(attempt, score)
        if attempt.has_failed:
            return
        if not self.openings.get(name):
            self.openings[name] = opening(attempt.result, LONGEST_OPENING)
            if (answer := shown_answer(expected_answer(attempt.result))) is not None:
                self.expected[name] = cut(answer, LONGEST_NAME)
        figures = {
            REWARD: score.outcome.reward,
            CALLS: score.calls,
            TOKENS: score.output_tokens,
            SECONDS: score.seconds or None,
        }
        for title, figure in figures.items():
            if figure is not None:
                self.charts[title].append(figure)
        if score.seconds and attempt.calls is not None:
            for part, seconds in time_split(score.seconds, attempt.calls).items():
                self.times[part] += seconds

    def _has_place(self, score: Score) -> bool:
        """Whether its task is one of the first so far; a later one gives way to it."""
        place = score.line, score.task
        if score.task in self.conversations:
            return True
        if len(self.places) >= self.tasks:
            if not self.places or place > self.places[-1]:
                return False
            del self.conversations[self.places.pop()[1]]
        bisect.insort(self.places, place)
        self.conversations[score.task] = []
        return True

    def _keep_conversation(self, attempt: Attempt, score: Score) -> None:
        """Keep it if it is one of its task's first that finished, or of those that failed."""
        rollouts = self.conversations[score.task]
        alike = [rollout for rollout in rollouts if rollout.has_failed == attempt.has_failed]
        if len(alike) >= self.per_task:
            if score.order > alike[-1].order:
                return
            rollouts.remove(alike[-1])
        seed = "" if attempt.seed is None else f" seed {attempt.seed}"
        label = f"repeat {attempt.repeat}{seed}"
        part = {**conversation(attempt, score.outcome, label), "key": f"{score.task} {label}"}
        bisect.insort(
            rollouts, RolloutPart(score.order, attempt.has_failed, part), key=lambda rollout: rollout.order
        )

    def task_names(self, tasks: Iterable[Task]) -> dict[TaskKey, str]:
        """Return a name for each task: environment, line, and the first words that differ between its environment's tasks."""
        texts: dict[str, list[str]] = defaultdict(list)
        for (environment, *_), text in self.openings.items():
            if text:
                texts[environment].append(text)
        shared = {environment: _shared_words(several) for environment, several in texts.items()}
        names = {}
        for task in tasks:
            text = self.openings.get(task.key, "")
            rest = text[shared.get(task.environment, 0) :]
            words = text if len(rest) == len(text) else f"…{rest}"
            words = words if len(words) <= LONGEST_NAME else f"{words[: LONGEST_NAME - 1]}…"
            names[task.key] = f"{task.name} {words}".strip()
        return names

    def add_failure(self, attempt: Attempt) -> None:
        """Add a failed attempt."""
        error = attempt.error or StoredError()
        names = ("judge" if error.judge else error.kind, error.type)
        self.failures[names] += 1
        self.messages.setdefault(names, error.message)


def _shared_words(texts: Sequence[str]) -> int:
    """Return how many characters all texts begin with, up to the end of a word; 0 if one has no more than that."""
    if len(texts) < 2:
        return 0
    first, last = min(texts), max(texts)
    same = next(
        (n for n, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first)
    )
    count = first.rfind(" ", 0, same) + 1
    return count if all(len(text) > count for text in texts) else 0


def time_split(total_s: float, calls: Calls) -> dict[str, float]:
    """Divide a rollout's seconds by what they were spent on; where calls overlap, the earlier one counts."""
    split = dict.fromkeys(TIMES, 0.0)
    reached, between = 0.0, "waiting and set-up"
    for call in sorted(calls, key=lambda call: call.started_s):
        start = min(call.started_s, total_s)
        end = min(start + call.duration_s, total_s)
        split[between] += max(0.0, start - reached)
        kind = "policy" if call.model_server == POLICY else "judges"
        split[kind] += max(0.0, end - max(start, reached))
        reached, between = max(reached, end), "tools and agent"
    split["scoring" if between != "waiting and set-up" else between] += max(0.0, total_s - reached)
    return split
