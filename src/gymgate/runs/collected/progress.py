"""A run under way: its rollouts so far, which its table is made of in the end, and how fast they come."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gymgate.core.config import POLICY
from gymgate.runs.counted.costs import TokenUsage
from gymgate.runs.counted.tasks import CollectedTasks
from gymgate.runs.described.prices import Prices
from gymgate.runs.stored.record import CollectedRollout
from gymgate.runs.stored.score import score_of

_WINDOW_S = 60.0
_REPLICA_SAMPLES = 7


@dataclass
class ReplicaRate:
    """How fast one replica of the policy samples."""

    healthy: bool = True
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_REPLICA_SAMPLES))
    """Times, and tokens sampled until then."""

    @property
    def token_rate(self) -> float | None:
        """Recent tokens per second; `None` before the second sample."""
        if len(self.samples) < 2:
            return None
        (since, before), (now, tokens) = self.samples[0], self.samples[-1]
        return (tokens - before) / (now - since) if now > since else None


@dataclass
class RunProgress:
    """Times and rates of this process, and in `tasks` the counts of the whole run."""

    total: int = 0
    resumed: int = 0
    """Finished, or given up, before this process."""
    given_up_before: int = 0
    finished: int = 0
    failed: int = 0
    """Given up in this process."""
    tasks: CollectedTasks = field(default_factory=CollectedTasks)
    """Every rollout of the run, those of earlier processes included."""
    by_environment: Counter[str] = field(default_factory=Counter)
    """Finished or given up in this process: what rates are made of."""
    attempts_failed: int = 0
    failed_in_a_row: int = 0
    output_tokens: int = 0
    prices: Prices = field(default_factory=dict)
    """Empty: costs are not shown."""
    started: float = field(default_factory=time.monotonic)
    last_finished: float = field(default_factory=time.monotonic)
    replicas: dict[str, ReplicaRate] = field(default_factory=dict)
    """By address, where the policy has several."""
    _recent: deque[tuple[float, int, int]] = field(default_factory=deque)
    """Times with the rollouts and tokens until then: one point per second of the last minute."""

    def start(self) -> None:
        """The stack is ready: rates count from here."""
        self.started = self.last_finished = time.monotonic()

    def count(self, rollout: CollectedRollout) -> None:
        """Count a rollout that finished."""
        self.finished += 1
        self.failed_in_a_row = 0
        self.tasks.add(score_of(rollout))
        self.output_tokens += sum(call.usage.output_tokens or 0 for call in rollout.policy_calls)
        self._note(rollout.environment)

    def count_failure(self, rollout: CollectedRollout, *, final: bool) -> None:
        """Count a failed attempt; `final` if no further one follows."""
        self.attempts_failed += 1
        if not final:
            self.tasks.add_attempt(score_of(rollout))
            return
        self.failed += 1
        self.failed_in_a_row += 1
        self.tasks.add(score_of(rollout))
        self._note(rollout.environment)

    def sample_replicas(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the replicas' current states, as the stack's status shows them."""
        now = time.monotonic()
        for url, state in states.items():
            rate = self.replicas.setdefault(url, ReplicaRate())
            rate.healthy = bool(state["healthy"])
            rate.samples.append((now, int(state.get("output_tokens", 0))))

    @property
    def done(self) -> int:
        """Finished or given up, in this process and before."""
        return self.resumed + self.finished + self.failed

    @property
    def left(self) -> int:
        return max(0, self.total - self.done)

    @property
    def rate(self) -> float | None:
        """Recent rollouts per second."""
        return self._rate(1, self.finished + self.failed)

    def mean_rate(self, environment: str | None) -> float | None:
        """Return the rollouts per second of this process, of an environment or of all (`None`); `None` before the first."""
        seconds = self.last_finished - self.started
        counts = self.by_environment
        count = counts.total() if environment is None else counts[environment]
        return count / seconds if count and seconds > 0 else None

    @property
    def token_rate(self) -> float | None:
        """Recent sampled tokens per second; `None` if the endpoint counts none."""
        return self._rate(2, self.output_tokens) if self.output_tokens else None

    @property
    def cached_share(self) -> float | None:
        """The share of the policy's input tokens that came from a cache; `None` if its endpoint does not say."""
        usage = self.tasks.usage.of_policy(self.prices)
        return None if usage is None else usage.cached_share

    @property
    def priced_usage(self) -> TokenUsage | None:
        """The policy's tokens and their cost; `None` without a price of the policy."""
        return self.tasks.usage.of_policy(self.prices) if POLICY in self.prices else None

    @property
    def eta_s(self) -> float | None:
        """Seconds left at the recent rate."""
        rate = self.rate
        return self.left / rate if rate else None

    def _rate(self, column: int, now: int) -> float | None:
        if not self._recent:
            return None
        point = self._recent[0] if len(self._recent) > 1 else (self.started, 0, 0)
        seconds = time.monotonic() - point[0]
        return (now - point[column]) / seconds if seconds > 0 else None

    def _note(self, environment: str) -> None:
        self.by_environment[environment] += 1
        self._note_time()

    def _note_time(self) -> None:
        now = self.last_finished = time.monotonic()
        if not self._recent or now - self._recent[-1][0] >= 1.0:
            self._recent.append((now, self.finished + self.failed, self.output_tokens))
        while len(self._recent) > 2 and now - self._recent[0][0] > _WINDOW_S:
            self._recent.popleft()
