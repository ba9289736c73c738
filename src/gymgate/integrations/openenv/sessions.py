"""NeMo Gym rollouts as OpenEnv sessions (contract: openenv 0.10, `ResourceSessionFactory` and `TrainableSession`)."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import (
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    TrainingTrace,
    TrainingTurn,
    VerifyResult,
)

from gymgate.core.errors import ConfigError, GymgateError, TokenDataError
from gymgate.integrations.openenv.row_tools import tools_of
from gymgate.integrations.training.rollouts import FailureGuard, RolloutRunner, SampledRollout
from gymgate.integrations.training.sources import prompt_messages
from gymgate.integrations.training.spec import weighted_reward
from gymgate.integrations.trl.engine import TRLServerEngine, server_policy
from gymgate.integrations.trl.spec import NeMoGymSpec
from gymgate.rollouts import outcome_of
from gymgate.stack.sync import LoopThread
from gymgate.tokens import TokenConversation, TokenTurn

GUARDED_ROLLOUTS = 32
"""Rollouts that count as one batch for `FailureGuard`: TRL's worker does not say how many it runs at once."""


@dataclass
class RecordedConversation(TokenConversation):
    """A conversation that keeps each request and answer beside its ids."""

    exchanges: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """One per entry of `turns`."""

    def _record(self, request: Any, prepared: Any, sample: Any) -> dict[str, Any]:
        answer = super()._record(request, prepared, sample)
        self.exchanges.append((dict(request), answer))
        return answer


class NeMoGymSessionFactory(ResourceSessionFactory):  # type: ignore[misc]
    """Makes one session per rollout, for TRL's `HarnessRolloutWorker`.

        spec = NeMoGymSpec("workplace_assistant", data="train.jsonl")
        worker = HarnessRolloutWorker(
            harness_session_factory=partial(NeMoGymSessionFactory, spec, tokenizer, "http://localhost:8000"),
            dataset=spec.train_dataset, ...,
        )

    The tokens are sampled at `base_url`, a vLLM server, unless the spec names an engine. `sampling` wins over what rows ask
    for; the worker gives its own. A rollout ends as truncated after `max_completion_length` ids beyond its first prompt.
    Connects to the stack, and raises the error of a start that fails. Any number of threads may use it.
    """

    def __init__(
        self,
        spec: NeMoGymSpec,
        tokenizer: Any,
        base_url: str,
        *,
        sampling: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_completion_length: int | None = None,
    ) -> None:
        self.spec = spec
        self.policy = server_policy(
            spec,
            tokenizer,
            base_url,
            sampling=sampling or {},
            chat_template_kwargs=chat_template_kwargs,
            max_completion_len=max_completion_length,
        )
        self.failure: GymgateError | None = None
        """The error of `FailureGuard`: rollouts have failed for so long that the training is to end."""
        self._runner = RolloutRunner(
            spec.settings.stack, spec.settings.limits, FailureGuard(GUARDED_ROLLOUTS)
        )
        self._loop = LoopThread()
        try:
            self._loop.call(self._runner.ready())
        except BaseException:
            self._loop.stop()
            raise

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> NeMoGymSession:
        """Start a rollout of the row that a prompt of the spec's datasets stands for. Raises `DataError` for another prompt.

        `seed` and `episode_id` have no effect: the prompt says which row it is.
        """
        return NeMoGymSession(self, *self.spec.row(task))

    def start(
        self, environment: str, row: Mapping[str, Any], conversation: TokenConversation
    ) -> Future[SampledRollout]:
        """Start a rollout. Cancelling the future cancels it."""
        return self._loop.submit(self._run(environment, row, conversation))

    def close(self) -> None:
        """Release the stack. No session can be used after that."""
        if isinstance(self.policy.engine, TRLServerEngine):
            self._loop.call(self.policy.engine.close())
        self._loop.call(self._runner.close())
        self._loop.stop()

    async def _run(
        self, environment: str, row: Mapping[str, Any], conversation: TokenConversation
    ) -> SampledRollout:
        await self._runner.ready()
        sampled = await self._runner.run(environment, row, conversation)
        try:
            self._runner.guard.check([sampled.rollout.error])
        except GymgateError as error:
            self.failure = error
        return sampled


class NeMoGymSession(ResourceSession):  # type: ignore[misc]
    """A rollout under way, run by NeMo Gym's own agent: wait for it, then read what it sampled and its reward."""

    def __init__(self, factory: NeMoGymSessionFactory, environment: str, row: Mapping[str, Any]) -> None:
        self.environment = environment
        self.row = row
        self._factory = factory
        self._conversation = RecordedConversation(factory.policy)
        self._rollout = factory.start(environment, row, self._conversation)

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """Return 0 when the rollout has a result, 1 if so many rollouts have failed that the training is to end.

        Raises the error of a failed rollout, and `TimeoutError` after `timeout_s`; the rollout then goes on.
        """
        error = self._rollout.result(timeout_s).rollout.error
        if error is None:
            return 0
        if self._factory.failure is not None:
            return 1
        raise error.to_exception()

    def fetch_training_trace(self) -> TrainingTrace:
        """Return the model calls so far, one turn each, as `TokenConversation.turns` has them, but for those whose answers the
        agent never got.

        Raises `TokenDataError`, which ends the training, for a sampled id without a logprob, and if `wait_for_completion`
        returned 1.
        """
        if (failure := self._factory.failure) is not None:
            raise TokenDataError(f"there is nothing to train on: {failure}") from failure
        conversation = self._conversation
        numbered = enumerate(zip(conversation.turns, conversation.exchanges, strict=False))
        return TrainingTrace(
            turns=[
                _training_turn(f"{conversation.session}-{number}", turn, *exchange)
                for number, (turn, exchange) in numbered
                if turn.completion_ids and not conversation.is_left_out(number)
            ]
        )

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> VerifyResult:
        """Return NeMo Gym's reward; `None` where no reward is to be learned from (see `gymgate.outcome_of`).

        The arguments have no effect: NeMo Gym scored what its agent did.
        """
        if not self._rollout.done():
            return VerifyResult()
        rollout = self._rollout.result().rollout
        settings = self._factory.spec.settings
        outcome = outcome_of(rollout, score_truncated=settings.score_truncated)
        return VerifyResult(
            env_reward=weighted_reward(rollout, outcome.training_reward, settings.weights),
            done=True,
            metrics={**rollout.metrics, **rollout.reward_parts},
            artifacts={"rollout_id": rollout.id, "outcome": outcome.reason},
        )

    def initial_messages(self) -> list[dict[str, Any]]:
        """Return the row's conversation as roles and texts."""
        return prompt_messages(self.row)

    def list_tools(self) -> list[Tool]:
        """Return the tools that the row offers."""
        return tools_of(self.row)

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Raise `ConfigError`: NeMo Gym's agent calls the tools."""
        raise ConfigError(
            f"tool {name!r} is called by NeMo Gym's agent; to call tools yourself, use gymgate serve-env"
        )

    def close(self) -> None:
        """Cancel the rollout if it has not ended. Idempotent."""
        self._rollout.cancel()


def _training_turn(
    node_id: str, turn: TokenTurn, request: dict[str, Any], answer: dict[str, Any]
) -> TrainingTurn:
    if turn.logprobs is None:
        raise TokenDataError("the engine gave no logprob for a sampled id; OpenEnv's traces need all of them")
    return TrainingTurn(
        node_id=node_id,
        prompt_token_ids=list(turn.prompt_ids),
        completion_token_ids=list(turn.completion_ids),
        per_token_logps=list(turn.logprobs),
        loss_mask=[0] * len(turn.prompt_ids) + [1] * len(turn.completion_ids),
        request=request,
        response=answer,
    )
