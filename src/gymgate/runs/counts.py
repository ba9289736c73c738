"""`RolloutCounts`: rollouts by outcome, their rewards, and why they failed; the one place where rollouts are counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gymgate.core.json_server import shortened
from gymgate.rollouts import Outcome, Rollout, outcome_of
from gymgate.rollouts.outcome import Reason

OVERALL = "all"
"""The environment of a row over all environments."""
NOT_SCORED: tuple[Reason, ...] = ("failed", "masked", "unscored", "truncated", "overflowed")
"""Outcomes with a column each where there are any; of these only truncated and overflowed rollouts are in the mean."""
_MOST_CAUSES = 1000
"""Distinct messages that are counted; later ones count as one."""
_ROUTE = re.compile(r"/ng-rollout/[^/\s]+")
"""Left out of messages: rollouts that differ only in their gateway URL were masked for one reason."""


@dataclass
class RolloutCounts:
    """Rollouts by outcome. Its size does not grow with their number."""

    outcomes: Counter[Reason] = field(default_factory=Counter)
    scored: int = 0
    """Rollouts whose reward counts; `reward_sum` is the sum of these rewards."""
    reward_sum: float = 0.0
    causes: Counter[str] = field(default_factory=Counter)
    """Why rollouts failed or were masked."""

    @classmethod
    def total(cls, several: Iterable[RolloutCounts]) -> RolloutCounts:
        """Return all counts together."""
        total = RolloutCounts()
        for counts in several:
            total.outcomes.update(counts.outcomes)
            total.scored += counts.scored
            total.reward_sum += counts.reward_sum
            total.causes.update(counts.causes)
        return total

    def add(self, outcome: Outcome) -> None:
        """Count a rollout."""
        self.outcomes[outcome.reason] += 1
        if outcome.reward is not None:
            self.scored += 1
            self.reward_sum += outcome.reward

    def add_rollout(self, rollout: Rollout) -> None:
        """Count a rollout that finished or failed permanently, and why it failed or was masked."""
        outcome = outcome_of(rollout)
        self.add(outcome)
        if rollout.error is not None:
            self.add_cause(f"{rollout.error.type}: {rollout.error.message}")
        elif outcome.reason == "masked":
            result = rollout.result or {}
            kind, why = result.get("failure_kind") or "no reason given", result.get("failure_reason") or ""
            self.add_cause(f"masked: {kind} {_ROUTE.sub('', str(why))}")

    def add_cause(self, text: str) -> None:
        """Count why a rollout failed or was masked."""
        line = shortened(text)
        known = line in self.causes or len(self.causes) < _MOST_CAUSES
        self.causes[line if known else "other causes"] += 1

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
