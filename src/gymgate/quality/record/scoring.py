"""Scores made-up answers, several at once, without a judge unless the user named one."""

from __future__ import annotations

import asyncio

from gymgate.core.config import POLICY
from gymgate.gateway.backends.base import PolicyCallable
from gymgate.gateway.route import POLICY_AS_JUDGE
from gymgate.quality.record.context import (
    MAX_CALLS,
    NO_JUDGE_ANSWERS,
    OWN_JUDGE,
    MeasurementContext,
    ReplayCase,
    reward_of,
)
from gymgate.quality.sections import NO_REWARD
from gymgate.rollouts import Rollout

AT_ONCE = 8
TIMEOUT_S = 30.0
"""Seconds for one rollout."""


class Scorer:
    """Runs rows with made-up policies."""

    def __init__(self, context: MeasurementContext) -> None:
        self._context = context
        self._free = asyncio.Semaphore(AT_ONCE)
        self.counted = 0
        """Rollouts with a reward that counts."""
        self.judge_problem = ""
        """Why a judge that was asked could not judge; empty if none was asked in vain."""
        self.first_error = NO_REWARD
        """The error of the first rollout that failed."""
        self.is_limited = False
        """Whether a rollout went on until its last call."""

    @property
    def problem(self) -> str:
        """Why there is no reward at all."""
        limited = f"its rollouts go on after {MAX_CALLS} such answers" if self.is_limited else ""
        return self.judge_problem or limited or NO_REWARD

    async def score(self, case: ReplayCase, policy: PolicyCallable) -> float | None:
        """Return the reward that counts; `None` if there is none, or if it is that of a judge who could not judge."""
        async with self._free:
            rollout = await self._context.run_without_judge(
                case, policy, timeout_s=TIMEOUT_S, max_calls=MAX_CALLS
            )
        if problem := self._judge_problem(rollout):
            self.judge_problem = problem
            return None
        if (reward := reward_of(rollout)) is not None:
            self.counted += 1
        elif rollout.error is not None and self.first_error == NO_REWARD:
            self.first_error = f"{rollout.error.type}: {rollout.error.message}"
        self.is_limited = self.is_limited or (reward is None and rollout.limit is not None)
        return reward

    def _judge_problem(self, rollout: Rollout) -> str:
        """Why its judgement means nothing; empty if it does, or if there is none."""
        judges = {call.model_server for call in rollout.calls} - {POLICY}
        if POLICY_AS_JUDGE in judges:
            return OWN_JUDGE
        is_asked = bool(judges) or self._context.judge.refused > 0
        return NO_JUDGE_ANSWERS if is_asked and not self._context.request.stack.models else ""
