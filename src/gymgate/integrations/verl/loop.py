"""NeMo Gym as one of verl's agent loops."""

from __future__ import annotations

from typing import Any

import orjson
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput

from gymgate.errors import ConfigError, DataError, GymgateError, from_wire
from gymgate.integrations.training.figures import Attempt
from gymgate.integrations.verl.dataset import ENVIRONMENT, ROW, plain
from gymgate.integrations.verl.outputs import fitting, to_outputs
from gymgate.integrations.verl.reports import reason, report
from gymgate.integrations.verl.worker import LoopConfig, Worker, worker_of
from gymgate.rollout import outcome_of

_OURS = frozenset(LoopConfig.model_fields)


class NeMoGymAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Runs a row of `NeMoGymDataset` in its environment, its tokens sampled by verl's own generation servers.

    Registered by an entry of `actor_rollout_ref.rollout.agent.agent_loop_config_path`, whose fields are those of `LoopConfig`:

        - name: nemo_gym
          _target_: gymgate.verl.NeMoGymAgentLoop
          environments: [workplace_assistant, mcqa]

    Each segment of a rollout is an output of its own. A rollout that failed raises, so that verl tags its group `failure`; one
    that Gym masked, or that a limit ended, gives no output. Neither has a trained token or a place in its group's baseline.
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
        attempt = await self._worker().attempt(*self._row(kwargs), sampling_params)
        reward = outcome_of(attempt.rollout, score_truncated=self.settings.score_truncated).taught
        scored, several = reward is not None and bool(attempt.segments), "session_id" in kwargs
        await report(self.config, attempt, kwargs, scored=scored)
        if reward is None or not scored:
            return self._without_score(attempt, several)
        if several:
            return [AgentLoopOutput(**output) for output in to_outputs(attempt, reward)]
        return AgentLoopOutput(**to_outputs(self._longest(attempt), reward)[0])

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

    def _without_score(self, attempt: Attempt, several: bool) -> list[AgentLoopOutput]:
        """Nothing to train on: an error where the rollout failed, or where verl needs one trajectory at least."""
        error = failure(attempt)
        if not several:
            hint = "verl's v0 trainer has no place for it: set trainer.use_v1=true"
            raise ConfigError(f"{error.message}; {hint}") from error
        if attempt.rollout.error is not None or self._needs_trajectory():
            raise error
        return []

    def _needs_trajectory(self) -> bool:
        """Whether verl would stop at a finished group in which no session gave a trajectory (dynamic filtering)."""
        groups = self.config.algorithm.get("filter_groups") or {}
        return bool(groups.get("enable", False))

    def _longest(self, attempt: Attempt) -> Attempt:
        room = self.rollout_config.prompt_length, self.rollout_config.response_length
        segment = fitting(attempt.segments, *room)
        if segment is None:
            raise DataError(
                "no segment of rollout {} fits prompt_length={} and response_length={}".format(
                    attempt.rollout.id, *room
                )
            )
        return Attempt(attempt.rollout, [segment], attempt.turns, attempt.shown_ids)


def failure(attempt: Attempt) -> GymgateError:
    """The error of a rollout that gave nothing to train on."""
    rollout, why = attempt.rollout, reason(attempt)
    described = {} if rollout.error is None else rollout.error.model_dump()
    return from_wire(
        {**described, **why, "message": f"{why['message']} (rollout {rollout.id} of {rollout.environment})"}
    )
