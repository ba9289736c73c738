"""`NeMoGymSpec`: what `GRPOTrainer` takes, made from environment names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from gymgate.catalog import Catalog, Environment
from gymgate.config import EnvironmentConfig, RolloutLimits, RuntimeConfig, StackConfig
from gymgate.dataset import Row, blend, open_rows
from gymgate.errors import ConfigError, StackLostError
from gymgate.integrations.trl.batch import Attempt, Fold, failure_lines, to_batch
from gymgate.integrations.trl.dataset import locate, make_dataset
from gymgate.integrations.trl.policy import make_policy
from gymgate.rollout import Rollout
from gymgate.runtime import ensure_runtime
from gymgate.stack import Stack, connect
from gymgate.stack.sync import LoopThread
from gymgate.tokens import Engine, TokenPolicy
from gymgate.tokens.conversation import Renderer

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.getLogger(__name__)

Metrics = list[dict[str, float]]
GRACE_S = 30.0
"""Seconds beyond the rollout deadline after which a batch is given up."""


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
    trainer's own model in this process. The stack starts with the first batch and lives until `close`.
    """

    def __init__(
        self,
        environments: str | Sequence[str] | Mapping[str, float],
        *,
        data: str | Mapping[str, str] = "example",
        eval_data: str | Mapping[str, str] | None = None,
        rows: int | None = None,
        seed: int = 0,
        engine: Engine | Callable[[Any], Engine] | None = None,
        renderer: Renderer | Callable[[Any], Renderer] | None = None,
        limits: RolloutLimits | Mapping[str, Any] | None = None,
        runtime: RuntimeConfig | None = None,
        stack: Mapping[str, Any] | None = None,
        fold: Fold = "longest",
    ) -> None:
        self.weights = _weights(environments)
        self.data = data
        self.eval_data = eval_data
        self.rows = rows
        self.seed = seed
        self.engine = engine
        self.renderer = renderer
        self.limits = RolloutLimits.model_validate(limits or {"timeout_s": 1800})
        self.runtime = runtime or RuntimeConfig()
        self.fold: Fold = fold
        self.config = StackConfig(
            environments=tuple(EnvironmentConfig(name=name) for name in self.weights),
            runtime=self.runtime,
            **(stack or {}),
        )
        self._loop: LoopThread | None = None
        self._stack: Stack | None = None
        self._policies: dict[int, TokenPolicy] = {}

    @cached_property
    def train_dataset(self) -> Dataset:
        """Rows of all environments, blended by weight."""
        return make_dataset(islice(self._blend(self.data), self.rows), "train")

    @cached_property
    def eval_dataset(self) -> Dataset | None:
        """Rows to evaluate on; `None` without `eval_data`."""
        return None if self.eval_data is None else make_dataset(self._blend(self.eval_data), "eval")

    @property
    def reward_funcs(self) -> Callable[..., list[float | None]]:
        """The environment's reward, and per-environment figures in the trainer's own log."""
        return nemo_gym_reward

    def rollout_func(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """One rollout per prompt, all at once (TRL repeats prompts itself); see `to_batch` for what comes back.

        Returns within the rollout deadline and a grace; raises `StackLostError` if the stack is gone.
        """
        policy = self._policy(trainer)
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        attempts = self._on_loop(self._attempt_all(prompts, policy))
        for line in failure_lines(attempts):
            logger.warning("rollouts failed: %s", line)
        return to_batch(attempts, filler_id=tokenizer.eos_token_id, fold=self.fold)

    def close(self) -> None:
        """Release the stack. Idempotent; the next batch starts it again."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        stack, self._stack = self._stack, None
        self._policies.clear()
        if stack is not None:
            loop.call(stack.close())
        loop.leave()

    def __enter__(self) -> NeMoGymSpec:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _policy(self, trainer: Any) -> TokenPolicy:
        """One per trainer: making a renderer takes a while, and the sampling guard reports once."""
        if id(trainer) not in self._policies:
            self._policies[id(trainer)] = make_policy(trainer, self.engine, self.renderer)
        return self._policies[id(trainer)]

    def _on_loop(self, work: Any) -> list[Attempt]:
        if self._loop is None:
            self._loop = LoopThread()
            self._loop.enter()
        attempts: list[Attempt] = self._loop.call(work)
        return attempts

    async def _attempt_all(self, prompts: list[Any], policy: TokenPolicy) -> list[Attempt]:
        stack = await self._connected()
        attempts = [asyncio.create_task(self._attempt(stack, policy, prompt)) for prompt in prompts]
        try:
            return list(await asyncio.wait_for(asyncio.gather(*attempts), self.limits.timeout_s + GRACE_S))
        except TimeoutError as error:
            raise StackLostError("rollouts outlived their deadline and the stack did not end them") from error
        finally:
            for attempt in attempts:
                attempt.cancel()

    async def _connected(self) -> Stack:
        if self._stack is None:
            self._stack = await connect(self.config, progress=lambda line: logger.info("%s", line))
        return self._stack

    async def _attempt(self, stack: Stack, policy: TokenPolicy, prompt: Any) -> Attempt:
        environment, row = self._row(prompt)
        conversation = policy.conversation()
        rollout: Rollout = await stack.run(
            row, policy=conversation, environment=environment, limits=self.limits, record_bodies=False
        )
        shown = list(conversation.turns[0].prompt_ids) if conversation.turns else []
        return Attempt(rollout, conversation.segments, conversation.turns, shown)

    def _row(self, prompt: Any) -> tuple[str, dict[str, Any]]:
        name, position = locate(prompt)
        dataset = self.eval_dataset if name == "eval" else self.train_dataset
        assert dataset is not None
        record = dataset[position]
        return record["environment"], orjson.loads(record["row"])

    def _blend(self, data: str | Mapping[str, str]) -> Iterator[tuple[str, Row]]:
        installed = ensure_runtime(self.runtime)
        catalog = Catalog(installed.site, installed.version)
        found = {name: catalog.find(name) for name in self.weights}
        sources = [_named(each.name, _rows(each, name, data)) for name, each in found.items()]
        weighted = list(zip(sources, self.weights.values(), strict=True))
        return blend(weighted, seed=self.seed)


def _weights(environments: str | Sequence[str] | Mapping[str, float]) -> dict[str, float]:
    if isinstance(environments, Mapping):
        return {name: float(weight) for name, weight in environments.items()}
    names = [environments] if isinstance(environments, str) else list(environments)
    if not names:
        raise ConfigError("NeMoGymSpec needs at least one environment")
    return dict.fromkeys(names, 1.0)


def _rows(environment: Environment, name: str, data: str | Mapping[str, str]) -> Sequence[Row]:
    source = data if isinstance(data, str) else data.get(name)
    if source is None:
        raise ConfigError(f"data names no rows for environment {name!r}; it has {', '.join(sorted(data))}")
    return open_rows(source, environment=environment)


def _named(name: str, rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    return ((name, row) for row in rows)


def nemo_gym_reward(
    completions: list[Any],
    env_reward: list[float | None],
    rollout_metrics: Metrics,
    environment: list[str] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """The reward that NeMo Gym gave each rollout; `None` (unscorable to TRL) where it gave none."""
    if log_metric is not None:
        for name, value in _means(rollout_metrics, environment or [""] * len(completions)).items():
            log_metric(f"nemo_gym/{name}", value)
    return list(env_reward)


def _means(figures: Metrics, environments: Sequence[str]) -> dict[str, float]:
    gathered: dict[str, list[float]] = {}
    for values, environment in zip(figures, environments, strict=True):
        for name, value in values.items():
            gathered.setdefault(name, []).append(value)
            if environment:
                gathered.setdefault(f"{environment}/{name}", []).append(value)
    counted = {name: len(figures) for name in gathered if name.startswith("failed")}
    return {name: sum(values) / counted.get(name, len(values)) for name, values in gathered.items()}
