"""Whether packaged rows get a reward at all, where no recording can be replayed. Measurements of a grader are in `record`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import yaml

from gymgate.gym.catalog import EnvConfig
from gymgate.gym.inside.resolve import walk
from gymgate.quality.recorded_models import RecordedJudge
from gymgate.quality.recordings import RowData
from gymgate.rollouts import Rollout, outcome_of
from gymgate.stack import Policy

MAX_ROWS = 2
"""Packaged rows that are tried."""
MAX_COHORT = 64
IGNORANT = "I do not know."
"""The policy's answer to everything."""


class RewardTrial:
    """Runs packaged rows with a policy that knows nothing: first without a judge, then with a stand-in for it."""

    def __init__(
        self, run: Callable[[RowData, Policy], Awaitable[Rollout]], judge: RecordedJudge, config: EnvConfig
    ) -> None:
        self._run_row = run
        self._judge = judge
        self._cohort = cohort_size(config)
        self._cohorts = 0
        self.rollouts: list[Rollout] = []
        self.judge_missing = False
        """Whether a row's judge was called and could not answer."""
        self.by_stand_in = False
        """Whether the reward was given for a fixed text as the judge's answer."""

    @property
    def rewarded(self) -> bool:
        """Whether a rollout that asked the policy got a reward that its environment does not take back."""
        return any(_counts(rollout) for rollout in self.rollouts)

    async def run(self, rows: Sequence[RowData]) -> None:
        """Run up to `MAX_ROWS` rows until one gets a reward, and once more if a judge was asked."""
        for stand_in in (False, True):
            for row in rows[:MAX_ROWS]:
                self._judge.begin(None, stand_in=stand_in)
                rollout = await self._run_once(row)
                if self._judge.refused:
                    self.judge_missing = True
                    if self._cohort > 1:  # a score that it gives by itself after that says nothing
                        break
                    continue
                self.rollouts.append(rollout)
                if _counts(rollout):
                    self.by_stand_in = bool(self._judge.calls and stand_in)
                    return
            if not self.judge_missing:
                return

    async def _run_once(self, row: RowData) -> Rollout:
        """One rollout; the first of a cohort if the environment scores rollouts against each other."""
        if self._cohort == 1:
            return await self._run_row(row, answer_ignorantly)
        self._cohorts += 1  # otherwise an earlier cohort's score is given again
        group = {"_ng_group_id": uuid.uuid4().hex, "_ng_task_index": self._cohorts}
        members = ({**row, **group, "_ng_rollout_index": index} for index in range(self._cohort))
        return (await asyncio.gather(*(self._run_row(member, answer_ignorantly) for member in members)))[0]


def _counts(rollout: Rollout) -> bool:
    return outcome_of(rollout).counted and bool(rollout.policy_calls)


def cohort_size(config: EnvConfig) -> int:
    """How many rollouts of a row the environment scores together, read from the config's own file; 1 otherwise."""
    try:
        node = yaml.safe_load(config.path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return 1
    sizes = [value for path, value in walk(node) if path.endswith(".num_rollouts_per_prompt")]
    return next((size for size in sizes if isinstance(size, int) and 1 < size <= MAX_COHORT), 1)


async def answer_ignorantly(request: dict[str, Any]) -> dict[str, Any]:
    """A chat-completions policy that always gives the same answer."""
    message = {"role": "assistant", "content": IGNORANT}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "none",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
