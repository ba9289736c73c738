"""What a run has done so far, in numbers; nothing in it grows with the rollouts."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gymgate.rollout import Rollout, outcome_of
from gymgate.rollout.outcome import Reason

_WINDOW_S = 60.0
_LOOKS = 7
"""At the replicas, over which their rates are taken."""


@dataclass
class ReplicaPace:
    """How fast one replica of the policy samples."""

    healthy: bool = True
    looks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    """Times, and tokens sampled until then."""

    @property
    def token_rate(self) -> float | None:
        """Tokens per second, lately; `None` before the second look."""
        if len(self.looks) < 2:
            return None
        (since, before), (now, tokens) = self.looks[0], self.looks[-1]
        return (tokens - before) / (now - since) if now > since else None


@dataclass
class Tally:
    """Counts rollouts as they finish; those of earlier runs are in `resumed`."""

    total: int = 0
    resumed: int = 0
    """Finished, or given up, before this process."""
    given_up_before: int = 0
    finished: int = 0
    failed: int = 0
    """Given up in this process."""
    attempts_failed: int = 0
    counted: int = 0
    """Rollouts whose rewards are in `reward_sum`."""
    reward_sum: float = 0.0
    reasons: Counter[Reason] = field(default_factory=Counter)
    """Finished rollouts by their outcome."""
    input_tokens: int = 0
    output_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Failed attempts, by class and error."""
    failed_in_a_row: int = 0
    started: float = field(default_factory=time.monotonic)
    last_finished: float = field(default_factory=time.monotonic)
    replicas: dict[str, ReplicaPace] = field(default_factory=dict)
    """By address, where the policy has several."""
    _recent: deque[tuple[float, int, int]] = field(default_factory=deque)

    def start(self) -> None:
        """The stack is ready: rates count from here."""
        self.started = self.last_finished = time.monotonic()

    def count(self, rollout: Rollout) -> None:
        """A rollout that came to its end."""
        self.finished += 1
        self.failed_in_a_row = 0
        result = outcome_of(rollout)
        self.reasons[result.reason] += 1
        if result.reward is not None:
            self.counted += 1
            self.reward_sum += result.reward
        for call in rollout.policy_calls:
            self.input_tokens += call.usage.input_tokens or 0
            self.output_tokens += call.usage.output_tokens or 0
        self._mark()

    def count_failure(self, rollout: Rollout, *, final: bool) -> None:
        """An attempt that failed, for good or to be repeated."""
        assert rollout.error is not None
        self.attempts_failed += 1
        self.failures[f"{rollout.error.kind}: {rollout.error.type}"] += 1
        if final:
            self.failed += 1
            self.failed_in_a_row += 1
            self._mark()

    def look_at_replicas(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """What the stack says about each now."""
        now = time.monotonic()
        for url, state in states.items():
            pace = self.replicas.setdefault(url, ReplicaPace())
            pace.healthy = bool(state["healthy"])
            pace.looks.append((now, int(state.get("output_tokens", 0))))

    @property
    def done(self) -> int:
        """Finished or given up, in this process and before."""
        return self.resumed + self.finished + self.failed

    @property
    def left(self) -> int:
        return max(0, self.total - self.done)

    @property
    def mean_reward(self) -> float | None:
        """Over this process's rollouts that count."""
        return self.reward_sum / self.counted if self.counted else None

    @property
    def rate(self) -> float | None:
        """Rollouts per second, lately."""
        if not self._recent:
            return None
        since, count, _ = self._recent[0] if len(self._recent) > 1 else (self.started, 0, 0)
        seconds = time.monotonic() - since
        return (self.finished + self.failed - count) / seconds if seconds > 0 else None

    @property
    def token_rate(self) -> float | None:
        """Sampled tokens per second, lately; `None` if the endpoint counts none."""
        if not self._recent or not self.output_tokens:
            return None
        since, _, tokens = self._recent[0] if len(self._recent) > 1 else (self.started, 0, 0)
        seconds = time.monotonic() - since
        return (self.output_tokens - tokens) / seconds if seconds > 0 else None

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the recent rate."""
        rate = self.rate
        return self.left / rate if rate else None

    def _mark(self) -> None:
        """Keep one point a second, of the last minute."""
        now = self.last_finished = time.monotonic()
        if not self._recent or now - self._recent[-1][0] >= 1.0:
            self._recent.append((now, self.finished + self.failed, self.output_tokens))
        while len(self._recent) > 2 and now - self._recent[0][0] > _WINDOW_S:
            self._recent.popleft()
