"""The state that one of verl's agent-loop workers keeps between rollouts, since verl makes a new agent loop for each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, model_validator

from gymgate.config import Config, EnvironmentConfig, RayCluster, RolloutLimits, RuntimeConfig, StackConfig
from gymgate.integrations.training.rollouts import RolloutRunner, SampledRollout
from gymgate.tokens import TokenPolicy
from gymgate.tokens.conversation import make_renderer
from gymgate.tokens.engines import ServerManagerEngine
from gymgate.tokens.sampling import NAMES


class LoopConfig(Config):
    """An entry of the file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names, beside `name` and `_target_`."""

    environments: tuple[str | EnvironmentConfig, ...] = Field(min_length=1)
    """Environments of the stack: packaged names, paths to configs of your own, or `EnvironmentConfig`s. Rows name theirs."""
    renderer: dict[str, Any] | None = None
    """Config of the `renderers` package (`{name: qwen3}`), or only its name; `None`: by the tokenizer's name or path."""
    limits: RolloutLimits = RolloutLimits(timeout_s=1800)
    """Limits of one rollout."""
    runtime: RuntimeConfig = RuntimeConfig()
    """The nemo-gym release and the interpreter it runs in."""
    ray: str | RayCluster | None = None
    """Run the stacks on the nodes of the Ray cluster that verl runs on: `auto`, or the fields of `RayCluster`. `None`: each
    machine with agent-loop workers has its own stack."""
    stack: dict[str, Any] = Field(default_factory=dict)
    """Further fields of `StackConfig`: `models` for judges, `env_vars`, `agent_processes`, `linger_s`."""
    score_truncated: bool = False
    """Train on rollouts that a limit ended, with the reward they got; by default they are left out."""

    @model_validator(mode="before")
    @classmethod
    def _expand_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        environments, renderer = value.get("environments"), value.get("renderer")
        return {
            **value,
            **({"environments": (environments,)} if isinstance(environments, str) else {}),
            **({"renderer": {"name": renderer}} if isinstance(renderer, str) else {}),
        }

    @model_validator(mode="after")
    def _check_stack(self) -> Self:
        self.stack_config()
        return self

    def stack_config(self) -> StackConfig:
        """Return the stack's config. All agent-loop workers of a machine share it, unless `stack` sets `share`."""
        return StackConfig(
            environments=self.environments,
            runtime=self.runtime,
            ray=self.ray,
            **{"share": "machine", **self.stack},
        )


@dataclass
class Group:
    """The sessions of one prompt, which verl runs in one worker."""

    open: int = 0
    """Sessions that have not ended."""
    gave_output: bool = False
    """Whether one of them gave verl an output."""


class Groups:
    """The groups with an open session."""

    def __init__(self) -> None:
        self._open: dict[str, Group] = {}

    @contextmanager
    def session(self, uid: str) -> Iterator[Group]:
        """Count a session of a group while it runs."""
        group = self._open.setdefault(uid, Group())
        group.open += 1
        try:
            yield group
        finally:
            group.open -= 1
            if not group.open:
                del self._open[uid]


class Worker:
    """Stack, renderer and policies of one worker, for the event loop that made it."""

    def __init__(
        self,
        config: LoopConfig,
        server_manager: Any,
        tokenizer: Any,
        rollout: Any,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        """`rollout` is verl's `actor_rollout_ref.rollout`, `template` its `data.apply_chat_template_kwargs`."""
        self.server_manager = server_manager
        self.renderer = make_renderer(tokenizer, config.renderer, template)
        self.response_length = int(rollout.response_length)
        self.model_length = int(
            rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
        )
        self.groups = Groups()
        self.runner = RolloutRunner(config.stack_config(), config.limits)
        self._policies: dict[tuple[Any, ...], TokenPolicy] = {}

    async def run(
        self, environment: str, row: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> SampledRollout:
        """Run one rollout with the sampling parameters that verl set for it; see `RolloutRunner.run`."""
        return await self.runner.run(environment, row, self.policy(sampling).conversation())

    def policy(self, sampling: Mapping[str, Any]) -> TokenPolicy:
        """Return the policy for these parameters. Training and validation have one each, so warnings are given once."""
        pinned = {name: sampling[name] for name in NAMES if sampling.get(name) is not None}
        logprobs = bool(sampling.get("logprobs"))
        key = (logprobs, *sorted(pinned.items()))
        if key not in self._policies:
            self._policies[key] = TokenPolicy(
                ServerManagerEngine(self.server_manager, logprobs=logprobs),
                self.renderer,
                sampling=pinned,
                max_model_len=self.model_length,
                max_completion_len=self.response_length,
            )
        return self._policies[key]


_workers: dict[asyncio.AbstractEventLoop, dict[tuple[int, str], Worker]] = {}


def worker_of(config: LoopConfig, server_manager: Any, *arguments: Any) -> Worker:
    """Return the running event loop's worker for a config; made with `arguments` (see `Worker`) on first use."""
    for loop in [loop for loop in _workers if loop.is_closed()]:
        del _workers[loop]
    workers = _workers.setdefault(asyncio.get_running_loop(), {})
    key = (id(server_manager), config.model_dump_json())
    if key not in workers:
        workers[key] = Worker(config, server_manager, *arguments)
    return workers[key]
