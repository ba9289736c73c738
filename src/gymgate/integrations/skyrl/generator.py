"""NeMo Gym as a generator of SkyRL (contract: skyrl 0.4, `GeneratorInterface`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
from skyrl.train.generators.base import TRAINING_PHASE_EVAL, GeneratorInterface
from skyrl.train.generators.utils import build_vllm_cache_salt, get_rollout_metrics

from gymgate.core.task_groups import task_group
from gymgate.integrations.skyrl.engine import (
    GeneratorSettings,
    InferenceClient,
    InferenceServersEngine,
    check_config,
    pinned_sampling,
)
from gymgate.integrations.skyrl.outputs import TrainedRow, log_entries, reward_of, to_output, to_rows
from gymgate.integrations.training.rollouts import FailureGuard, RolloutRunner, SampledRollout
from gymgate.integrations.training.sources import row_in
from gymgate.tokens import TokenPolicy
from gymgate.tokens.conversation import make_renderer


class NeMoGymGenerator(GeneratorInterface):  # type: ignore[misc]
    """Runs rows of `NeMoGymDataset` in their environments, their tokens sampled by SkyRL's inference servers.

    `cfg` is SkyRL's config, with `generator.step_wise_trajectories=true`: each segment of a rollout is one of SkyRL's steps.
    A rollout that failed, that Gym masked, or that a limit ended (unless `score_truncated` is set) is left out: it has
    neither a trained token nor a place in its group's baseline. `to_rows` says what becomes of a group with one or none
    left. In an evaluation, truncated rollouts keep their reward.

    An answer may have `max_generate_length` tokens, and a conversation, its last answer included, `max_input_length` more.
    Belongs to one event loop. Raises `ConfigError` for settings that do not fit.
    """

    def __init__(
        self,
        cfg: Any,
        tokenizer: Any,
        inference_engine_client: InferenceClient,
        settings: GeneratorSettings,
    ) -> None:
        check_config(cfg)
        self.cfg = cfg
        self.client = inference_engine_client
        self.settings = settings
        batch_size = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
        self.runner = RolloutRunner(settings.stack, settings.limits, FailureGuard(batch_size))
        self._filler_id: int = tokenizer.eos_token_id
        self._renderer = make_renderer(
            tokenizer,
            dict(settings.renderer) if settings.renderer else None,
            cfg.generator.chat_template_kwargs,
        )
        self._model: str = resolve_policy_model_name(cfg)
        self._engine = InferenceServersEngine(self.client.get_endpoint_url(), self._model, self._cache_salt)
        self._policies: dict[tuple[Any, ...], TokenPolicy] = {}

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Run one rollout per prompt, all at once (SkyRL repeats prompts itself), and return their segments.

        Once the stack is up, this returns within about a second of the rollout deadline. Raises the error of a first
        start that fails, and the most frequent error when batch after batch fails (see `FailureGuard`).
        """
        await self.runner.ready()
        policy = self._policy(input_batch["sampling_params"] or {})
        async with task_group() as group:
            tasks = [
                group.create_task(self._run(columns, policy)) for columns in input_batch["env_extras"] or ()
            ]
        rollouts = [task.result() for task in tasks]
        rows = self._rows(rollouts, input_batch)
        ids = {id.instance_id for id in input_batch["trajectory_ids"]}
        self.runner.guard.check([sampled.rollout.error for sampled in rollouts], groups=len(ids))
        return to_output(rows, {**_skyrl_metrics(rows), **log_entries(rollouts)})

    async def close(self) -> None:
        """Release the stack and close the connections of this event loop. Idempotent."""
        await self._engine.close()
        await self.runner.close()

    async def _run(self, columns: Mapping[str, Any], policy: TokenPolicy) -> SampledRollout:
        environment, row = row_in(columns, "return a NeMoGymDataset from get_train_dataset")
        conversation = policy.conversation()
        try:
            return await self.runner.run(environment, row, conversation)
        finally:
            await self.client.finish_session(conversation.session)  # its server may get another rollout

    def _rows(self, rollouts: list[SampledRollout], input_batch: Mapping[str, Any]) -> list[TrainedRow]:
        metadata = input_batch["batch_metadata"]
        evaluation = metadata is not None and metadata.training_phase == TRAINING_PHASE_EVAL
        rewards = [
            reward_of(
                sampled,
                self.settings.weights,
                score_truncated=self.settings.score_truncated,
                evaluation=evaluation,
            )
            for sampled in rollouts
        ]
        return to_rows(
            rollouts,
            input_batch["trajectory_ids"],
            rewards,
            filler_id=self._filler_id,
            evaluation=evaluation,
        )

    def _policy(self, sampling: Mapping[str, Any]) -> TokenPolicy:
        """Return the policy for these parameters. Training and evaluation have one each, so warnings are given once."""
        key = tuple(sorted((name, repr(value)) for name, value in sampling.items()))
        if key not in self._policies:
            pinned, generator = pinned_sampling(sampling), self.cfg.generator
            answer = pinned.get("max_tokens", generator.sampling_params.max_generate_length)
            room = generator.max_input_length + answer
            served = generator.inference_engine.engine_init_kwargs.get("max_model_len", room)
            self._policies[key] = TokenPolicy(
                self._engine, self._renderer, sampling=pinned, max_model_len=min(room, served)
            )
        return self._policies[key]

    def _cache_salt(self) -> str | None:
        version = getattr(self.client, "weight_version", None)
        if version is None or not self.cfg.generator.use_cache_salt:
            return None
        salt: str = build_vllm_cache_salt(version, self._model)
        return salt


def _skyrl_metrics(rows: list[TrainedRow]) -> dict[str, Any]:
    """Return SkyRL's own metrics of the rows of rollouts that have a reward."""
    scored = [row for row in rows if row.stop_reason != "error"]
    if not scored:
        return {}
    metrics: dict[str, Any] = get_rollout_metrics(
        [row.segment.completion_ids for row in scored],
        [row.reward for row in scored],
        loss_masks=[row.segment.mask for row in scored],
        trajectory_completion_times=[row.total_s for row in scored if row.is_last],
    )
    return metrics
