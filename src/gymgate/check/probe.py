"""Whether any reward comes back at all, where no recording can be played: packaged rows, and a policy that knows
nothing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import yaml

from gymgate.catalog import EnvConfig
from gymgate.catalog.resolve import walk
from gymgate.check.judges import RecordedJudge
from gymgate.rollout import Rollout, outcome_of
from gymgate.stack import Policy

SAID = "I do not know."
"""What the policy answers where no recording can be played."""
PROBES = 2
"""Packaged rows that are tried."""
MAX_COHORT = 64
UNASKED = "the agent was scored without asking the policy"

Run = Callable[[dict[str, Any], Policy], Awaitable[Rollout]]


class Probe:
    """What packaged rows showed: first without a judge, then with a stand-in for it."""

    def __init__(self, run: Run, judge: RecordedJudge, config: EnvConfig) -> None:
        self._run = run
        self._judge = judge
        self._cohort = cohort_size(config)
        self._cohorts = 0
        self.rollouts: list[Rollout] = []
        self.judge_missing = False
        """Whether a packaged row's judge was called, and nobody could answer."""
        self.by_stand_in = False
        """Whether the reward that came back was for a fixed text as the judge's answer."""

    @property
    def rewarded(self) -> bool:
        """Whether a rollout in which the policy was asked got a reward that its environment does not take back."""
        return any(_counts(rollout) for rollout in self.rollouts)

    async def run(self, rows: Sequence[dict[str, Any]]) -> None:
        """Until a reward comes back; `PROBES` rows, twice if a judge was asked."""
        for stand_in in (False, True):
            for row in rows[:PROBES]:
                self._judge.begin(None, stand_in=stand_in)
                rollout = await self._once(row)
                if self._judge.refused:
                    self.judge_missing = True
                    if self._cohort > 1:  # what it scores by itself after that says nothing
                        break
                    continue
                self.rollouts.append(rollout)
                if _counts(rollout):
                    self.by_stand_in = bool(self._judge.calls and stand_in)
                    return
            if not self.judge_missing:
                return

    async def _once(self, row: dict[str, Any]) -> Rollout:
        """One rollout; where the environment scores rollouts against each other, the first of as many as it
        waits for."""
        if self._cohort == 1:
            return await self._run(row, say_nothing)
        self._cohorts += 1  # or an earlier one's score is given again
        group = {"_ng_group_id": uuid.uuid4().hex, "_ng_task_index": self._cohorts}
        members = ({**row, **group, "_ng_rollout_index": index} for index in range(self._cohort))
        rollouts = await asyncio.gather(*(self._run(member, say_nothing) for member in members))
        return rollouts[0]


def _counts(rollout: Rollout) -> bool:
    return outcome_of(rollout).counted and bool(rollout.policy_calls)


def cohort_size(config: EnvConfig) -> int:
    """Rollouts of one row that the environment scores together, as the config's own file has it; else 1."""
    try:
        node = yaml.safe_load(config.path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return 1
    sizes = [value for path, value in walk(node) if path.endswith(".num_rollouts_per_prompt")]
    return next((size for size in sizes if isinstance(size, int) and 1 < size <= MAX_COHORT), 1)


async def say_nothing(request: dict[str, Any]) -> dict[str, Any]:
    """A chat-completions policy without an idea."""
    choice = {"index": 0, "message": {"role": "assistant", "content": SAID}, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "none",
        "choices": [choice],
    }
