"""NeMo Gym as one of verl's agent loops."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput

from gymgate.core.errors import ConfigError, DataError, GymgateError, from_wire
from gymgate.integrations.training.rollouts import SampledRollout
from gymgate.integrations.training.sources import row_in
from gymgate.integrations.training.spec import REWARD, weighted_reward
from gymgate.integrations.verl.dataset import plain
from gymgate.integrations.verl.outputs import fitting, to_outputs
from gymgate.integrations.verl.reports import is_validation, report, why_untrained
from gymgate.integrations.verl.worker import LoopConfig, Worker, worker_of
from gymgate.rollouts import outcome_of

logger = logging.getLogger(__name__)


class NeMoGymAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Runs a row of `NeMoGymDataset` in its environment, its tokens sampled by verl's own generation servers.

    Registered by an entry of `actor_rollout_ref.rollout.agent.agent_loop_config_path`, whose fields are those of `LoopConfig`:

        - name: nemo_gym
          _target_: gymgate.verl.NeMoGymAgentLoop
          environments: [workplace_assistant, mcqa]

    Each segment of a rollout is one output. A rollout that failed, that Gym masked, or that a limit ended gives no output:
    it has neither a trained token nor a place in its group's baseline, and the rest of the group is trained on. If a whole
    group gives no output, its last session raises, so that verl tags the group `failure` and can draw another prompt. In
    validation, truncated rollouts keep their reward.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings = {name: plain(kwargs.pop(name)) for name in LoopConfig.names() & kwargs.keys()}
        super().__init__(*args, **kwargs)
        self.settings = LoopConfig.model_validate(settings)

    async def run(
        self, sampling_params: dict[str, Any], **kwargs: Any
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Run one rollout of the row in `kwargs` and return all of its segments; to verl's v0 worker, the longest one."""
        if self.rollout_config.get("enable_rollout_routing_replay", False):
            raise ConfigError(
                "actor_rollout_ref.rollout.enable_rollout_routing_replay must be false: NeMo Gym agents return no routed experts"
            )
        environment, row = row_in(
            kwargs, "set data.custom_cls.path=pkg://gymgate.verl data.custom_cls.name=NeMoGymDataset"
        )
        worker = self._worker()
        if "session_id" not in kwargs:
            return await self._run_v0(await worker.run(environment, row, sampling_params), kwargs)
        with worker.groups.session(kwargs["uid"]) as group:
            await asyncio.sleep(0)  # verl starts the sessions of a group together: all are counted after this
            sampled = await worker.run(environment, row, sampling_params)
            reward = await self._reward(sampled, kwargs)
            parts = {name: value for name, value in self._parts(sampled).items() if value is not None}
            outputs = [] if reward is None else to_outputs(sampled, reward, parts)
            await report(self.config, sampled, kwargs, trained=bool(outputs))
            if not outputs:
                logger.warning("no output for verl: %s", untrained_error(sampled))
            group.gave_output |= bool(outputs)
            if group.open == 1 and not group.gave_output:
                raise untrained_error(sampled)
            return [AgentLoopOutput(**output) for output in outputs]

    async def _run_v0(self, sampled: SampledRollout, kwargs: dict[str, Any]) -> AgentLoopOutput:
        """Return one output: verl's v0 worker takes no more, and none without a reward."""
        outcome = outcome_of(sampled.rollout, score_truncated=self.settings.score_truncated)
        reward = weighted_reward(sampled.rollout, outcome.training_reward, self.settings.weights)
        trained = reward is not None and bool(sampled.segments)
        await report(self.config, sampled, kwargs, trained=trained)
        if reward is None or not trained:
            error = untrained_error(sampled)
            hint = "verl's v0 trainer cannot leave it out: set trainer.use_v1=true"
            raise ConfigError(f"{error.message}; {hint}") from error
        lengths = self.rollout_config.prompt_length, self.rollout_config.response_length
        segment = fitting(sampled.segments, *lengths)
        if segment is None:
            bounds = "prompt_length={} and response_length={}".format(*lengths)
            raise DataError(f"no segment of rollout {sampled.rollout.id} fits {bounds}")
        return AgentLoopOutput(
            **to_outputs(replace(sampled, segments=[segment]), reward, self._parts(sampled))[0]
        )

    async def _reward(self, sampled: SampledRollout, kwargs: dict[str, Any]) -> float | None:
        """Return the reward to learn from; in validation the one to count, which a truncated rollout has too."""
        outcome = outcome_of(sampled.rollout, score_truncated=self.settings.score_truncated)
        counts = outcome.trained or (outcome.counted and await is_validation(kwargs))
        return weighted_reward(sampled.rollout, outcome.reward if counts else None, self.settings.weights)

    def _parts(self, sampled: SampledRollout) -> dict[str, float | None]:
        """Return the parts of the reward that the entry names; `None` for one that the rollout does not have.

        verl leaves `None` out of its means. Its v0 batch needs every name in every rollout; its v1 takes what there is.
        """
        return {
            name: sampled.rollout.reward_parts.get(name)
            for name, _ in self.settings.reward_parts
            if name != REWARD
        }

    def _worker(self) -> Worker:
        template = plain(self.apply_chat_template_kwargs)
        return worker_of(self.settings, self.server_manager, self.tokenizer, self.rollout_config, template)


def untrained_error(sampled: SampledRollout) -> GymgateError:
    """Return the error of a rollout that is not trained on, with its id and environment."""
    rollout, reason = sampled.rollout, why_untrained(sampled)
    fields = {} if rollout.error is None else rollout.error.model_dump()
    message = f"{reason['message']} (rollout {rollout.id} of {rollout.environment})"
    return from_wire({**fields, **reason, "message": message})
