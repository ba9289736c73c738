"""`NeMoGymSpec`: what TRL's trainers take, made from environment names."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import orjson

from gymgate.config import EnvironmentConfig, RolloutLimits, RuntimeConfig, StackConfig
from gymgate.integrations.training.attempts import Attempts
from gymgate.integrations.training.figures import Attempt
from gymgate.integrations.training.sources import Source, blended
from gymgate.integrations.trl.batch import SegmentChoice, to_batch
from gymgate.integrations.trl.dataset import locate, make_dataset
from gymgate.integrations.trl.failures import FailureWatch
from gymgate.integrations.trl.policy import (
    EngineSource,
    RendererSource,
    TrainersEngine,
    make_policy,
    tokenizer_of,
)
from gymgate.integrations.trl.reward import nemo_gym_reward
from gymgate.integrations.trl.sources import find_sources, in_turn, weights_of
from gymgate.stack.sync import LoopThread
from gymgate.tokens import TokenPolicy

if TYPE_CHECKING:
    from datasets import Dataset

    from gymgate.integrations.trl.async_worker import RolloutWorker


class NeMoGymSpec:
    """NeMo Gym environments for TRL.

        spec = NeMoGymSpec({"workplace_assistant": 2.0, "mcqa": 1.0}, data="train.jsonl")
        trainer = GRPOTrainer(
            model, args=args, train_dataset=spec.train_dataset, eval_dataset=spec.eval_dataset,
            rollout_func=spec.rollout_func, reward_funcs=spec.reward_funcs,
        )

    `environments` are names (or paths to configs of your own), with weights where they are a mapping. `data` and `eval_data` name
    the rows (see `gymgate.open_rows`), for all environments or by environment; `rows` bounds how many the training blend holds.
    `engine` samples the tokens: by default the trainer's vLLM server where `use_vllm` is set with `vllm_mode="server"`, else the
    trainer's own model in this process. `renderer` is by default what the `renderers` package has for the model, or a name
    there. Truncated rollouts teach nothing unless `score_truncated`.

    `sandbox` is the provider of environments that run commands in one. `stack` holds further fields of `StackConfig`: `models`
    for judges, `environments` with overrides or another agent, ...
    The stack starts with the first batch and lives until `close`; the ranks of one machine share it. A spec can be pickled.
    """

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
        self.limits = RolloutLimits.model_validate(limits or {"timeout_s": 1800})
        self.segment_choice: SegmentChoice = segment_choice
        self.score_truncated = score_truncated
        described = {
            "environments": tuple(EnvironmentConfig(name=name, sandbox=sandbox) for name in self.weights),
            "runtime": runtime or RuntimeConfig(),
            "share": _share(),
        }
        self.config = StackConfig.model_validate({**described, **(stack or {})})
        self._forget()

    @cached_property
    def train_dataset(self) -> Dataset:
        """Rows of all environments, blended by weight (see `blended`)."""
        return make_dataset(blended(self._sources(self.data), limit=self.rows, seed=self.seed), "train")

    @cached_property
    def eval_dataset(self) -> Dataset | None:
        """Every row to evaluate on once; `None` without `eval_data`."""
        return (
            None if self.eval_data is None else make_dataset(in_turn(self._sources(self.eval_data)), "eval")
        )

    @property
    def reward_funcs(self) -> Callable[..., list[float | None]]:
        """The environment's reward, and per-environment figures in the trainer's own log."""
        return nemo_gym_reward

    def rollout_func(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """One rollout per prompt, all at once (TRL repeats prompts itself); see `to_batch` for what comes back.

        Returns within about a second of the rollout deadline, once the stack is up. Raises what went wrong when batch
        after batch fails (see `FailureWatch`). In an evaluation, truncated rollouts keep their reward.
        """
        trainer.accelerator.wait_for_everyone()  # TRL's main process alone sends weights to the server, until now
        policy = self._policy(trainer)
        attempts = self._on_loop(self._attempt_all(prompts, policy))
        self._watch.see(attempts)
        return to_batch(
            attempts,
            filler_id=tokenizer_of(trainer.processing_class).eos_token_id,
            segment_choice=self.segment_choice,
            score_truncated=self.score_truncated or not trainer.model.training,
        )

    def rollout_worker(
        self, args: Any, processing_class: Any, *, lora_name: str | None = None
    ) -> RolloutWorker:
        """For `AsyncGRPOTrainer(rollout_worker=worker)`, with the trainer's arguments and tokenizer.

        Then call `worker.follow(trainer)`, so that its checkpoints keep the position in the data.
        `lora_name` is `"trl-policy"` where TRL trains an adapter that it publishes to a server started with `--enable-lora`.
        """
        from gymgate.integrations.trl.async_worker import RolloutWorker

        return RolloutWorker(self, args, processing_class, lora_name=lora_name)

    def row(self, prompt: Any) -> tuple[str, dict[str, Any]]:
        """Environment and row of a prompt of `train_dataset` or `eval_dataset`. `DataError` for any other."""
        name, position = locate(prompt)
        dataset = self.eval_dataset if name == "eval" else self.train_dataset
        assert dataset is not None
        record = dataset[position]
        return record["environment"], orjson.loads(record["row"])

    def close(self) -> None:
        """Give the stack back. Idempotent; the next batch takes it again."""
        if self._loop is None:
            return
        loop, attempts, policies = self._loop, self._attempts, self._policies
        self._forget()
        loop.call(_close(attempts, policies.values()))
        loop.leave()

    def __enter__(self) -> NeMoGymSpec:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(("_loop", "_attempts", "_watch", "_policies"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        """Of a process: what is alive in it."""
        self._loop: LoopThread | None = None
        self._attempts: Attempts | None = None
        self._watch = FailureWatch()
        self._policies: dict[int, TokenPolicy] = {}

    def _policy(self, trainer: Any) -> TokenPolicy:
        """One per trainer: making a renderer takes a while, and the sampling guard reports once."""
        if id(trainer) not in self._policies:
            self._policies[id(trainer)] = make_policy(trainer, self.engine, self.renderer)
        return self._policies[id(trainer)]

    def _on_loop(self, work: Any) -> list[Attempt]:
        if self._loop is None:
            self._loop = LoopThread()
            self._loop.enter()
        done: list[Attempt] = self._loop.call(work)
        return done

    async def _attempt_all(self, prompts: list[Any], policy: TokenPolicy) -> list[Attempt]:
        rows = [self.row(prompt) for prompt in prompts]
        if self._attempts is None:
            made = Attempts(self.config, self.limits)
            await made.start()  # a first start that fails ends the training, a later one is a failed rollout
            self._attempts = made
        await asyncio.sleep(self._watch.pause_s)
        try:
            async with asyncio.TaskGroup() as running:
                tasks = [running.create_task(self._attempts.attempt(*row, policy)) for row in rows]
        except BaseExceptionGroup as group:  # one is as good as the other
            raise group.exceptions[0] from None
        return [task.result() for task in tasks]

    def _sources(self, data: str | Mapping[str, str]) -> list[Source]:
        return find_sources(self.weights, data, self.config)


async def _close(attempts: Attempts | None, policies: Iterable[TokenPolicy]) -> None:
    for policy in policies:
        if isinstance(policy.engine, TrainersEngine):
            await policy.engine.close()
    if attempts is not None:
        await attempts.close()


def _share() -> str:
    """The ranks of one machine share a stack, where a launcher says that there are several."""
    return "machine" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 else "process"
