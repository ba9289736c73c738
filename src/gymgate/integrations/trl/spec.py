"""`NeMoGymSpec`: environments, rows and rollouts for TRL's trainers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pydantic import Field, ValidationError

from gymgate.core import codec
from gymgate.core.config import EnvironmentSettings, RolloutLimits, StackConfig, validation_message
from gymgate.core.errors import ConfigError
from gymgate.core.task_groups import task_group
from gymgate.integrations.training.rollouts import RolloutRunner, SampledRollout
from gymgate.integrations.training.sources import blended, in_turn, read_rows
from gymgate.integrations.training.spec import TrainingSpec
from gymgate.integrations.trl.batch import RewardPart, SegmentChoice, check_weights, nemo_gym_reward, to_batch
from gymgate.integrations.trl.dataset import locate, make_dataset, open_environment_rows, weights_of
from gymgate.integrations.trl.engine import (
    EngineSource,
    RendererSource,
    TRLServerEngine,
    check_timeout,
    make_policy,
    tokenizer_of,
    vllm_awake,
)
from gymgate.stack.sync import LoopThread
from gymgate.tokens import TokenPolicy
from gymgate.tokens.engines import ColocatedEngine, HuggingFaceEngine

if TYPE_CHECKING:
    from datasets import Dataset


class TRLSettings(TrainingSpec):
    """Settings of `NeMoGymSpec(environments, engine=..., renderer=..., ...)`.

    `agent`, `sandbox` and `routing` may be given too, for each of the environments. The ranks of a machine share one stack,
    unless `share` is set.
    """

    stack: StackConfig
    """Servers of the environments, and the endpoints of judges. Its fields may also be given directly: `models`, `ray`."""
    limits: RolloutLimits = RolloutLimits(timeout_s=1500)
    """Bounds on each rollout. Those that are not set keep this default, which is below the 1800 s that ranks wait for each
    other (`ddp_timeout`)."""
    data: str | dict[str, str] = "example"
    """Rows of all environments, or of each: packaged file by name, JSONL path, or `hf:owner/name[:split]`."""
    eval_data: str | dict[str, str] | None = None
    """Rows of evaluations, as `data`; `None`: there is no `eval_dataset`."""
    rows: int | None = Field(default=None, ge=1)
    """Maximum rows of the training blend; `None`: all."""
    seed: int = 0
    """Seed of the blend."""
    segment_choice: SegmentChoice = "longest"
    """Segment to train on if a rollout has several: the one with most sampled ids, or the last."""

    @classmethod
    def stack_defaults(cls) -> Mapping[str, Any]:
        several_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1
        return {"share": "machine" if several_ranks else "process"}


class NeMoGymSpec:
    """NeMo Gym environments for TRL.

        spec = NeMoGymSpec({"workplace_assistant": 2.0, "mcqa": 1.0}, data="train.jsonl")
        trainer = GRPOTrainer(
            model, args=args, train_dataset=spec.train_dataset, eval_dataset=spec.eval_dataset,
            rollout_func=spec.rollout_func, reward_funcs=spec.reward_funcs,
        )

    `environments` are names, or paths to configs of your own; a mapping gives them weights. `settings` are those of
    `TRLSettings`. `engine` samples the tokens. Its default is the trainer's own: for `use_vllm` its vLLM server, or the vLLM
    in its process; else its model in this process. `renderer` is a name in the `renderers` package; its default is what that
    package has for the model.

    The stack starts with the first batch and runs until `close`; the ranks of one machine share it. A spec can be pickled.
    Raises `ConfigError` for settings that do not fit.
    """

    _loop: LoopThread | None
    _runner: RolloutRunner
    _policies: WeakKeyDictionary[Any, TokenPolicy]
    """By trainer, as long as that lives."""

    def __init__(
        self,
        environments: str | Sequence[str] | Mapping[str, float],
        *,
        engine: EngineSource | None = None,
        renderer: RendererSource | None = None,
        **settings: Any,
    ) -> None:
        self.weights = weights_of(environments)
        self.engine = engine
        self.renderer = renderer
        self.settings = _settings(tuple(self.weights), settings)
        self._reset()

    def _reset(self) -> None:
        """Set what belongs to this process: a copy in another process starts without it."""
        self._loop = None
        self._runner = RolloutRunner(self.settings.stack, self.settings.limits)
        self._policies = WeakKeyDictionary()

    @cached_property
    def train_dataset(self) -> Dataset:
        """Rows of all environments, drawn by weight (see `blended`)."""
        sources = open_environment_rows(self.weights, self.settings.data, self.settings.stack)
        draws = islice(blended(sources, self.settings.seed), self.settings.rows)
        return make_dataset(read_rows(sources, draws), "train")

    @cached_property
    def eval_dataset(self) -> Dataset | None:
        """Every row of `eval_data` once; `None` without `eval_data`."""
        if self.settings.eval_data is None:
            return None
        sources = open_environment_rows(self.weights, self.settings.eval_data, self.settings.stack)
        return make_dataset(read_rows(sources, in_turn(sources)), "eval")

    @property
    def reward_funcs(self) -> list[Callable[..., list[float | None]]]:
        """The reward functions: the environment's reward, which logs metrics of each environment, and one for each of
        `reward_parts`."""
        _, *parts = self.settings.weights
        return [nemo_gym_reward, *map(RewardPart, parts)]

    @property
    def reward_weights(self) -> list[float]:
        """The weights of `reward_funcs`, for `GRPOConfig`."""
        return [*self.settings.weights.values()]

    def rollout_func(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Run one rollout per prompt, all at once (TRL repeats prompts itself), and return them as `to_batch` says.

        Once the stack is up, this returns within about a second of the rollout deadline. Raises the error of a first
        start that fails, and the most frequent error when batch after batch fails (see `FailureGuard`). In an
        evaluation, truncated rollouts keep their reward.
        """
        from accelerate.utils import gather_object

        trainer.accelerator.wait_for_everyone()  # until TRL's main process has sent the weights to the server
        if trainer not in self._policies:  # a renderer takes a while to make, and warnings are given once
            if self.settings.reward_parts:
                check_weights(trainer, self.reward_weights)
            check_timeout(trainer, self.settings.limits.timeout_s)
            self._policies[trainer] = make_policy(trainer, self.engine, self.renderer)
        if self._loop is None:
            self._loop = LoopThread()
        policy = self._policies[trainer]
        rows = [self.row(prompt) for prompt in prompts]
        serve = policy.engine.serve_until if isinstance(policy.engine, ColocatedEngine) else None
        with vllm_awake(trainer):
            rollouts = self._loop.call(self._run_all(rows, policy), meanwhile=serve)
        batch = to_batch(
            rollouts,
            filler_id=tokenizer_of(trainer.processing_class).eos_token_id,
            segment_choice=self.settings.segment_choice,
            score_truncated=self.settings.score_truncated or not trainer.model.training,
            weights=self.settings.weights,
        )
        # every rank decides the same, over the rollouts of all
        errors = [sampled.rollout.error for sampled in rollouts]
        results = gather_object(list(zip(map(locate, prompts), errors, strict=True)))
        self._runner.guard.check([error for _, error in results], groups=len({row for row, _ in results}))
        return batch

    async def _run_all(
        self, rows: Sequence[tuple[str, dict[str, Any]]], policy: TokenPolicy
    ) -> list[SampledRollout]:
        await self._runner.ready()
        try:
            async with task_group() as group:
                tasks = [group.create_task(self._runner.run(*row, policy.conversation())) for row in rows]
        finally:
            if isinstance(policy.engine, HuggingFaceEngine):
                await policy.engine.stop()  # the trainer's model, which it now trains
        return [task.result() for task in tasks]

    def row(self, prompt: Any) -> tuple[str, dict[str, Any]]:
        """Return environment and row of a prompt from the spec's datasets. Raises `DataError` for another prompt."""
        name, position = locate(prompt)
        dataset = self.eval_dataset if name == "eval" else self.train_dataset
        assert dataset is not None
        record = dataset[position]
        return record["environment"], codec.loads(record["row"].encode())

    def close(self) -> None:
        """Release the stack. Idempotent; the next batch starts it again."""
        if self._loop is None:
            return
        loop, runner, policies = self._loop, self._runner, self._policies
        self._reset()
        loop.call(_close(runner, policies.values()))
        loop.stop()

    def __enter__(self) -> NeMoGymSpec:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(("_loop", "_runner", "_policies"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def _settings(names: Sequence[str], settings: Mapping[str, Any]) -> TRLSettings:
    """Return the settings of a spec for environments. Raises `ConfigError`."""
    of_each = {name: settings[name] for name in EnvironmentSettings.model_fields if name in settings}
    rest = {name: value for name, value in settings.items() if name not in of_each}
    try:
        return TRLSettings.model_validate(
            {**rest, "environments": [{"name": name, **of_each} for name in names]}
        )
    except ValidationError as error:
        raise ConfigError(f"NeMoGymSpec: {validation_message(error)}") from None


async def _close(runner: RolloutRunner, policies: Iterable[TokenPolicy]) -> None:
    for policy in policies:
        if isinstance(policy.engine, TRLServerEngine):
            await policy.engine.close()
    await runner.close()
