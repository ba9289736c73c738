"""One NeMo Gym row as a verifiers task, and how a finished rollout of it is scored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import BaseModel, ConfigDict

from gymgate.config import POLICY, RolloutLimits, StackConfig
from gymgate.rollout import Rollout, outcome_of

INFO_KEY = "nemo_gym"
REWARD = "reward"
UNSCORED = "nemo_gym/unscored"


class GymRun(BaseModel):
    """How to run the row. It travels with the task, so that a worker that never loads data can run it."""

    model_config = ConfigDict(frozen=True)

    environment: str
    agent: str | None = None
    stack: StackConfig
    limits: RolloutLimits = RolloutLimits()
    dialect: Literal["chat", "responses"] = "chat"


class NeMoGymData(vf.TaskData):
    """A row, verbatim, with the prompt that its agent opens with."""

    row: dict[str, Any]
    gym: GymRun


class NeMoGymTask(vf.Task[NeMoGymData, vf.State, vf.TaskConfig]):
    """Scored by Gym: the reward is read off the result that the harness left on the trace."""

    @property
    def key(self) -> str:
        """Stable over knobs and file names: the environment and the row's content."""
        return self.data.id or self.hash

    @vf.reward(weight=1.0)
    async def gym(self, trace: vf.Trace[Any]) -> dict[str, float]:
        """Gym's reward, and its parts with weight 0.

        A rollout that verifiers stopped or timed out has no result, and Gym masks one whose reward measures
        nothing: the reward stays `None`, verifiers' own mark for "not scored", and `nemo_gym/unscored` is 1.
        """
        result = trace.info.get(INFO_KEY) or {}
        reward = outcome_of(result).reward
        for name, value in result.get("reward_parts", {}).items() if reward is not None else ():
            trace.record_reward(name, value, weight=0.0)
        trace.record_metrics(result.get("metrics", {}))
        trace.record_metric(UNSCORED, float(reward is None))
        if reward is None:
            trace.rewards[REWARD] = None
            return {}
        return {REWARD: reward}


def record(trace: vf.Trace[Any], rollout: Rollout) -> None:
    """Leave the rollout on the trace: Gym's full result and what scoring reads, JSON-serialisable."""
    trace.info[INFO_KEY] = rollout.model_dump(mode="json", exclude={"calls"}, exclude_none=True)
    if not outcome_of(rollout, score_truncated=True).trained:  # verifiers' trainers decide on truncated ones
        trace.agent.trainable = False
    trace.extra_usage.extend(judge_usage(rollout))


def judge_usage(rollout: Rollout) -> list[vf.Usage]:
    """Of the calls that were not the policy's."""
    return [
        vf.Usage(
            prompt_tokens=call.usage.input_tokens - (call.usage.cached_tokens or 0),
            completion_tokens=call.usage.output_tokens,
            cached_input_tokens=call.usage.cached_tokens,
            reasoning_tokens=call.usage.reasoning_tokens,
        )
        for call in rollout.calls
        if call.model_server != POLICY
        and call.usage.input_tokens is not None
        and call.usage.output_tokens is not None
    ]


def with_system_prompt(row: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The row with `text` as its system message, in place of one that it opens with."""
    params = dict(row["responses_create_params"])
    messages = params["input"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if messages and messages[0].get("role") in ("system", "developer"):
        messages = messages[1:]
    params["input"] = [{"role": "system", "content": text}, *messages]
    return {**row, "responses_create_params": params}
