"""`RolloutCounts`: rollouts by outcome, their rewards, and why they failed; the one place where rollouts are counted."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from gymgate.core.json_server import shortened
from gymgate.rollouts import Outcome
from gymgate.rollouts.outcome import Reason

OVERALL = "all"
"""The environment of a row over all environments."""
NOT_SCORED: tuple[Reason, ...] = ("failed", "masked", "unscored", "truncated", "overflowed")
"""Outcomes with a column each where there are any; of these only truncated and overflowed rollouts are in the mean."""
_MOST_CAUSES = 1000
"""Distinct messages that are counted; later ones count as one."""
_MEASURED = re.compile(r"(?<=the policy answered its) \d+ calls? in [\d.]+ s")
"""Left out of messages: timeouts of one cause differ in it."""


@dataclass
class RolloutCounts:
    """Rollouts by outcome. Its size does not grow with their number."""

    outcomes: Counter[Reason] = field(default_factory=Counter)
    scored: int = 0
    """Rollouts whose reward counts; `reward_sum` is the sum of these rewards."""
    reward_sum: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)
    """Why rollouts failed or were masked."""

    def add(self, outcome: Outcome, cause: str | None = None) -> str:
        """Count a rollout, and why it failed or was masked; return the cause as it is counted, empty without one."""
        self.outcomes[outcome.reason] += 1
        if outcome.reward is not None:
            self.scored += 1
            self.reward_sum += outcome.reward
        return "" if cause is None else self.add_cause(cause)

    def add_cause(self, text: str) -> str:
        """Count why a rollout failed or was masked; return it as it is counted."""
        line = shortened(_MEASURED.sub(" calls", text))
        if line not in self.causes and len(self.causes) >= _MOST_CAUSES:
            line = "other causes"
        self.causes[line] += 1
        return line

    def forget_failure(self, cause: str) -> None:
        """Count a failed rollout no more: a later attempt finished. `cause` is as it was counted."""
        self.outcomes["failed"] -= 1
        if cause:
            self.causes[cause] -= 1
            if not self.causes[cause]:
                del self.causes[cause]

    @property
    def rollouts(self) -> int:
        """All rollouts, failed ones included."""
        return self.outcomes.total()

    @property
    def failed(self) -> int:
        return self.outcomes["failed"]

    @property
    def mean_reward(self) -> float | None:
        """Mean of the rewards that count; `None` without any."""
        return self.reward_sum / self.scored if self.scored else None

    def columns(self) -> dict[str, int]:
        """Return the counts by the names that they have in tables, files and `--json`."""
        return {
            "rollouts": self.rollouts,
            "scored": self.scored,
            "masked": self.outcomes["masked"],
            "unscored": self.outcomes["unscored"],
            "truncated": self.outcomes["truncated"],
            "overflowed": self.outcomes["overflowed"],
            "failed": self.failed,
        }
