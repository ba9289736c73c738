"""The outcome of a rollout: one truth table for every SDK, table, log and export. Pure functions.

The table is in docs/outcomes.md, where a test reads it. `breakdowns` finds the failures that an agent's answer reports.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

Reason = Literal["completed", "truncated", "overflowed", "unscored", "masked", "failed"]
"""completed, truncated: scored; overflowed: scored, and truncated by the policy's context length; unscored: finished without a
reward; masked: Gym says that the reward measures nothing; failed: there is no result, or the agent or a judge reports a
breakdown."""

LARGEST = 1e100
"""A larger number counts as none: sums of squares, which an interval needs, would be infinite."""
SCORES_WITHOUT_POLICY: Mapping[str, str] = MappingProxyType(
    {"remote_agent": "the service that it calls may ask its own model"}
)
"""Packaged agents that may score a rollout without a policy call, and why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a rollout counts for."""

    scored: bool
    """Whether Gym gave a reward, placeholders of masked rollouts included."""
    counted: bool
    """Whether its reward enters means."""
    trained: bool
    """Whether its tokens and its reward enter the loss and the baseline."""
    retryable: bool
    """Whether another attempt may help. It is made within the retries of its class of error."""
    reason: Reason
    reward: float | None = None
    """The number to count; `None` where none counts."""

    @property
    def training_reward(self) -> float | None:
        """The reward to learn from; `None` where the rollout is left out of training."""
        return self.reward if self.trained else None


class EndedRollout(Protocol):
    """The fields of a rollout's record that its outcome depends on."""

    @property
    def status(self) -> str: ...
    @property
    def limit(self) -> str | None: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def error(self) -> Any: ...


def outcome_of(rollout: EndedRollout | Mapping[str, Any], *, score_truncated: bool = False) -> Outcome:
    """Return what a rollout counts for, given its record, or the dict of it on disk.

    `score_truncated` is the trainer's option: truncated rollouts are left out of training unless it is set.
    """
    if not isinstance(rollout, Mapping):
        fields = ("status", "limit", "reward", "error")
        rollout = {name: getattr(rollout, name) for name in fields}
    error = rollout.get("error")
    if rollout.get("status") == "failed" or error is not None:
        return Outcome(False, False, False, retryable=_may_help(error), reason="failed")
    return _outcome(
        rollout.get("status"), rollout.get("limit"), number(rollout.get("reward")), score_truncated
    )


@functools.lru_cache(maxsize=1024)  # most of a million outcomes are equal, and a table of tasks keeps each
def _outcome(status: Any, limit: Any, reward: float | None, score_truncated: bool) -> Outcome:
    if status == "masked":
        return Outcome(reward is not None, False, False, False, "masked")
    if reward is None or status not in ("completed", "truncated"):
        return Outcome(False, False, False, False, "unscored")
    trained = status == "completed" or score_truncated
    is_overflow = limit == "context_length"
    reason: Reason = "completed" if status == "completed" else "overflowed" if is_overflow else "truncated"
    return Outcome(True, True, trained, False, reason, reward)


def failed_outcome(reward: float | None) -> Outcome:
    """Return what a failed rollout counts for where it counts with a reward."""
    return Outcome(False, reward is not None, False, False, "failed", reward)


def _may_help(error: Any) -> bool:
    """Whether another attempt may end differently: not if the policy refuses permanently, or the environment says so."""
    if error is None:
        return False
    described = error if isinstance(error, Mapping) else error.__dict__
    if described.get("terminal"):
        return False
    return described.get("kind") != "policy" or bool(described.get("retryable"))


def number(value: Any) -> float | None:
    """Return a finite number, booleans included; `None` for anything else, also beyond `LARGEST`."""
    if isinstance(value, bool | int | float) and abs(value) <= LARGEST:
        return float(value)
    return None
