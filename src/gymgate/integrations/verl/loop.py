"""NeMo Gym as one of verl's agent loops."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import orjson
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput

from gymgate.errors import ConfigError, DataError, GymgateError, from_wire
from gymgate.integrations.training.figures import Attempt
from gymgate.integrations.verl.dataset import ENVIRONMENT, ROW, plain
from gymgate.integrations.verl.outputs import fitting, to_outputs
from gymgate.integrations.verl.reports import reason, report, validates
from gymgate.integrations.verl.worker import LoopConfig, Worker, worker_of
from gymgate.rollout import outcome_of

logger = logging.getLogger(__name__)

_OURS = frozenset(LoopConfig.model_fields)


class NeMoGymAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Runs a row of `NeMoGymDataset` in its environment, its tokens sampled by verl's own generation servers.

    Registered by an entry of `actor_rollout_ref.rollout.agent.agent_loop_config_path`, whose fields are those of `LoopConfig`:

        - name: nemo_gym
          _target_: gymgate.verl.NeMoGymAgentLoop
          environments: [workplace_assistant, mcqa]

    Each segment of a rollout is an output of its own. A rollout that failed, that Gym masked, or that a limit ended gives no
    output: it has neither a trained token nor a place in its group's baseline, and its siblings stay. A group without any
    output raises, so that verl tags it `failure` and can draw another prompt. In validation, truncated rollouts keep their
    reward.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ours = {name: plain(kwargs.pop(name)) for name in _OURS & kwargs.keys()}
        super().__init__(*args, **kwargs)
        self.settings = LoopConfig.model_validate(ours)

    async def run(
        self, sampling_params: dict[str, Any], **kwargs: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """One rollout of the row in `kwargs`, with all of its segments (of verl's v0 worker, which takes one, the longest)."""
        self._refuse()
        environment, row = self._row(kwargs)
        worker, several = self._worker(), "session_id" in kwargs
        if not several:
            return await self._one_row(await worker.attempt(environment, row, sampling_params), kwargs)
        with worker.groups.session(kwargs["uid"]) as group:
            await asyncio.sleep(0)  # verl starts a group's sessions together: after this, all are counted
            attempt = await worker.attempt(environment, row, sampling_params)
            reward = await self._reward(attempt, kwargs)
            outputs = [] if reward is None else self._outputs(attempt, reward)
            await report(self.config, attempt, kwargs, scored=bool(outputs))
            if not outputs:
                logger.warning("no output for verl: %s", failure(attempt))
            group.gave_output |= bool(outputs)
            if group.open == 1 and not group.gave_output:
                raise failure(attempt)
            return outputs

    async def _one_row(self, attempt: Attempt, kwargs: dict[str, Any]) -> AgentLoopOutput:
        """For verl's v0 worker, which has no place for a rollout without a reward."""
        reward = outcome_of(attempt.rollout, score_truncated=self.settings.score_truncated).taught
        scored = reward is not None and bool(attempt.segments)
        await report(self.config, attempt, kwargs, scored=scored)
        if reward is None or not scored:
            error = failure(attempt)
            hint = "verl's v0 trainer has no place for it: set trainer.use_v1=true"
            raise ConfigError(f"{error.message}; {hint}") from error
        return AgentLoopOutput(**to_outputs(self._longest(attempt), reward)[0])

    async def _reward(self, attempt: Attempt, kwargs: dict[str, Any]) -> float | None:
        """The reward to learn from; in validation the one to count, which a truncated rollout has too."""
        result = outcome_of(attempt.rollout, score_truncated=self.settings.score_truncated)
        if result.counted and not result.trained and await validates(kwargs):
            return result.reward
        return result.taught

    def _outputs(self, attempt: Attempt, reward: float) -> list[AgentLoopOutput]:
        return [AgentLoopOutput(**output) for output in to_outputs(attempt, reward)]

    def _worker(self) -> Worker:
        template = plain(self.apply_chat_template_kwargs)
        return worker_of(self.settings, self.server_manager, self.tokenizer, self.rollout_config, template)

    def _row(self, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if ROW not in kwargs:
            raise ConfigError(
                f"the dataset has no column {ROW!r}; set data.custom_cls.path=pkg://gymgate.verl"
                " data.custom_cls.name=NeMoGymDataset"
            )
        return str(kwargs.get(ENVIRONMENT, "")), orjson.loads(kwargs[ROW])

    def _refuse(self) -> None:
        if self.rollout_config.get("enable_rollout_routing_replay", False):
            raise ConfigError(
                "actor_rollout_ref.rollout.enable_rollout_routing_replay: routed experts are not carried through Gym's agents"
            )

    def _longest(self, attempt: Attempt) -> Attempt:
        room = self.rollout_config.prompt_length, self.rollout_config.response_length
        segment = fitting(attempt.segments, *room)
        if segment is None:
            raise DataError(
                "no segment of rollout {} fits prompt_length={} and response_length={}".format(
                    attempt.rollout.id, *room
                )
            )
        return replace(attempt, segments=[segment])


def failure(attempt: Attempt) -> GymgateError:
    """The error of a rollout that gave nothing to train on."""
    rollout, why = attempt.rollout, reason(attempt)
    described = {} if rollout.error is None else rollout.error.model_dump()
    return from_wire(
        {**described, **why, "message": f"{why['message']} (rollout {rollout.id} of {rollout.environment})"}
    )
