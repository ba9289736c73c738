"""`NeMoGymSpec`: environments, rows and rollouts for TRL's trainers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from gymgate import codec
from gymgate.config import EnvironmentConfig, RayCluster, RolloutLimits, RuntimeConfig, StackConfig
from gymgate.errors import ConfigError
from gymgate.integrations.training.curriculum import CurriculumConfig
from gymgate.integrations.training.rollouts import FailureGuard, RolloutRunner, SampledRollout
from gymgate.integrations.training.rows import blended, in_turn, read_rows
from gymgate.integrations.trl.batch import SegmentChoice, nemo_gym_reward, to_batch
from gymgate.integrations.trl.dataset import locate, make_dataset, open_sources, weights_of
from gymgate.integrations.trl.policy import (
    EngineSource,
    RendererSource,
    TRLServerEngine,
    check_timeout,
    make_policy,
    tokenizer_of,
    vllm_awake,
)
from gymgate.stack.sync import LoopThread
from gymgate.task_groups import task_group
from gymgate.tokens import TokenPolicy
from gymgate.tokens.engines import ColocatedEngine, HuggingFaceEngine

if TYPE_CHECKING:
    from datasets import Dataset

    from gymgate.integrations.trl.async_worker import RolloutWorker
    from gymgate.integrations.trl.curriculum import BatchCurriculum


TIMEOUT_S = 1500.0
"""Of a rollout, unless `limits` says another; below the 1800 s that ranks wait for each other (`ddp_timeout`)."""


class NeMoGymSpec:
    """NeMo Gym environments for TRL.

        spec = NeMoGymSpec({"workplace_assistant": 2.0, "mcqa": 1.0}, data="train.jsonl")
        trainer = GRPOTrainer(
            model, args=args, train_dataset=spec.train_dataset, eval_dataset=spec.eval_dataset,
            rollout_func=spec.rollout_func, reward_funcs=spec.reward_funcs,
        )

    `environments` are names, or paths to configs of your own; a mapping gives them weights. `data` and `eval_data` name
    the rows (see `gymgate.open_rows`) for all environments or for each. `rows` limits the rows of the training blend.
    `engine` samples the tokens. Its default is the trainer's own: for `use_vllm` its vLLM server, or the vLLM in its
    process; else its model in this process. `renderer` is a name in the `renderers` package; its default is what that
    package has for the model. Truncated rollouts are left out of the loss unless `score_truncated` is set.

    `curriculum` draws each batch's rows by their pass rates, which the training's own rollouts measure; its state is kept
    beside each checkpoint. Without it rows come in the dataset's order or shuffled, as the trainer's arguments say.

    `sandbox` is the sandbox provider of environments that run commands in one. `stack` has further fields of
    `StackConfig`, such as `models` for judges or `environments` with overrides. The stack starts with the first batch and
    runs until `close`; the ranks of one machine share it. `ray` runs it on the nodes of a Ray cluster. A spec can be pickled.
    """

    _loop: LoopThread | None
    _runner: RolloutRunner | None
    _guard: FailureGuard
    _policies: WeakKeyDictionary[Any, TokenPolicy]
    """By trainer, as long as that lives."""
    _curricula: WeakKeyDictionary[Any, BatchCurriculum]

    def __init__(
        self,
        environments: str | Sequence[str] | Mapping[str, float],
        *,
        data: str | Mapping[str, str] = "example",
        eval_data: str | Mapping[str, str] | None = None,
        rows: int | None = None,
        seed: int = 0,
        engine: EngineSource | None = None,
        renderer: RendererSource | None = None,
        limits: RolloutLimits | Mapping[str, Any] | None = None,
        runtime: RuntimeConfig | Mapping[str, Any] | None = None,
        stack: Mapping[str, Any] | None = None,
        sandbox: str | None = None,
        ray: RayCluster | str | None = None,
        curriculum: CurriculumConfig | Mapping[str, Any] | None = None,
        segment_choice: SegmentChoice = "longest",
        score_truncated: bool = False,
    ) -> None:
        self.weights = weights_of(environments)
        self.data = data
        self.eval_data = eval_data
        self.rows = rows
        self.seed = seed
        self.engine = engine
        self.renderer = renderer
        named = limits.model_dump(exclude_unset=True) if isinstance(limits, RolloutLimits) else limits or {}
        self.limits = RolloutLimits.model_validate({"timeout_s": TIMEOUT_S, **named})
        self.curriculum = None if curriculum is None else CurriculumConfig.model_validate(curriculum)
        self.segment_choice: SegmentChoice = segment_choice
        self.score_truncated = score_truncated
        several_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1
        defaults = {
            "environments": tuple(EnvironmentConfig(name=name, sandbox=sandbox) for name in self.weights),
            "runtime": runtime or RuntimeConfig(),
            "ray": ray,
            "share": "machine" if several_ranks else "process",
        }
        self.config = StackConfig.model_validate({**defaults, **(stack or {})})
        self._reset()

    def _reset(self) -> None:
        """Set what belongs to this process: a copy in another process starts without it."""
        self._loop = None
        self._runner = None
        self._guard = FailureGuard()
        self._policies = WeakKeyDictionary()
        self._curricula = WeakKeyDictionary()

    @cached_property
    def train_dataset(self) -> Dataset:
        """Rows of all environments, drawn by weight (see `blended`)."""
        sources = open_sources(self.weights, self.data, self.config)
        draws = islice(blended(sources, self.seed), self.rows)
        return make_dataset(read_rows(sources, draws), "train")

    @cached_property
    def eval_dataset(self) -> Dataset | None:
        """Every row of `eval_data` once; `None` without `eval_data`."""
        if self.eval_data is None:
            return None
        sources = open_sources(self.weights, self.eval_data, self.config)
        return make_dataset(read_rows(sources, in_turn(sources)), "eval")

    @property
    def reward_funcs(self) -> Callable[..., list[float | None]]:
        """The reward function: it returns the environment's rewards and logs metrics of each environment."""
        return nemo_gym_reward

    def rollout_func(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Run one rollout per prompt, all at once (TRL repeats prompts itself), and return them as `to_batch` says.

        Once the stack is up, this returns within about a second of the rollout deadline. Raises the error of a first
        start that fails, and the most frequent error when batch after batch fails (see `FailureGuard`). In an
        evaluation, truncated rollouts keep their reward.
        """
        from accelerate.utils import gather_object

        trainer.accelerator.wait_for_everyone()  # until TRL's main process has sent the weights to the server
        if trainer not in self._policies:  # a renderer takes a while to make, and warnings are given once
            check_timeout(trainer, self.limits.timeout_s)
            self._policies[trainer] = make_policy(trainer, self.engine, self.renderer)
        if self._loop is None:
            self._loop = LoopThread()
            self._loop.enter()
        policy = self._policies[trainer]
        located = [locate(prompt) for prompt in prompts]
        curriculum = self._draw(trainer, located)
        rows = [curriculum.row(place) for _, place in located] if curriculum else map(self.row, prompts)
        serve = policy.engine.serve_until if isinstance(policy.engine, ColocatedEngine) else None
        with vllm_awake(trainer):
            rollouts = self._loop.call(self._run_all(list(rows), policy), meanwhile=serve)
        batch = to_batch(
            rollouts,
            filler_id=tokenizer_of(trainer.processing_class).eos_token_id,
            segment_choice=self.segment_choice,
            score_truncated=self.score_truncated or not trainer.model.training,
        )
        # every rank decides the same, over the rollouts of all
        errors = [each.rollout.error for each in rollouts]
        results = gather_object(list(zip(located, errors, batch["env_reward"], strict=True)))
        self._guard.check([error for _, error, _ in results], groups=len({row for row, _, _ in results}))
        if curriculum is not None:
            learned = curriculum.update((place, reward) for (_, place), _, reward in results)
            for metrics in batch["rollout_metrics"]:
                metrics |= learned
        return batch

    def _draw(self, trainer: Any, located: Sequence[tuple[str, int]]) -> BatchCurriculum | None:
        """Let the curriculum draw the rows of a training's batch; `None` without one, and in an evaluation."""
        if self.curriculum is None or not trainer.model.training:
            return None
        from accelerate.utils import gather_object

        if trainer not in self._curricula:
            from gymgate.integrations.trl.curriculum import BatchCurriculum

            sources = open_sources(self.weights, self.data, self.config)
            self._curricula[trainer] = BatchCurriculum(self.curriculum, sources, self.seed, trainer)
        places = self.train_dataset.select([place for _, place in located])["environment"]
        self._curricula[trainer].draw(
            gather_object([(place, name) for (_, place), name in zip(located, places, strict=True)])
        )
        return self._curricula[trainer]

    async def _run_all(
        self, rows: Sequence[tuple[str, dict[str, Any]]], policy: TokenPolicy
    ) -> list[SampledRollout]:
        if self._runner is None:
            runner = RolloutRunner(self.config, self.limits)
            await runner.start()  # the first start raises; a later one that fails is a failed rollout
            self._runner = runner
        await asyncio.sleep(self._guard.pause_s)
        try:
            async with task_group() as group:
                tasks = [group.create_task(self._runner.run(*row, policy.conversation())) for row in rows]
        finally:
            if isinstance(policy.engine, HuggingFaceEngine):
                await policy.engine.stop()  # the trainer's model, which it now trains
        return [task.result() for task in tasks]

    def rollout_worker(
        self, args: Any, processing_class: Any, *, lora_name: str | None = None
    ) -> RolloutWorker:
        """Make the worker for `AsyncGRPOTrainer(rollout_worker=worker)` from the trainer's arguments and tokenizer.

        Then call `worker.follow(trainer)`, so that its checkpoints keep the position in the data. `lora_name` is
        `"trl-policy"` if TRL publishes an adapter to a server that was started with `--enable-lora`.
        """
        from gymgate.integrations.trl.async_worker import RolloutWorker

        if self.curriculum is not None:
            raise ConfigError(
                "curriculum needs GRPOTrainer: AsyncGRPOTrainer takes rows ahead of what it learns"
            )
        return RolloutWorker(self, args, processing_class, lora_name=lora_name)

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
        loop.leave()

    def __enter__(self) -> NeMoGymSpec:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(("_loop", "_runner", "_guard", "_policies", "_curricula"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


async def _close(runner: RolloutRunner | None, policies: Iterable[TokenPolicy]) -> None:
    for policy in policies:
        if isinstance(policy.engine, TRLServerEngine):
            await policy.engine.close()
    if runner is not None:
        await runner.close()
