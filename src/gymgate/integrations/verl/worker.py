"""The state that one of verl's agent-loop workers keeps between rollouts, since verl makes a new agent loop for each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gymgate.integrations.training.rollouts import RolloutRunner, SampledRollout
from gymgate.integrations.training.spec import TokenSpec
from gymgate.tokens import TokenPolicy
from gymgate.tokens.conversation import make_renderer
from gymgate.tokens.engines import ServerManagerEngine
from gymgate.tokens.sampling import NAMES


class LoopConfig(TokenSpec):
    """Further keys of an entry in verl's `agent_loop_config_path` file, next to `name` and `_target_`.

    All agent-loop workers of a machine share one stack, unless `share` is set.
    """

    @classmethod
    def stack_defaults(cls) -> Mapping[str, Any]:
        return {"share": "machine"}


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
        self.renderer = make_renderer(tokenizer, dict(config.renderer) if config.renderer else None, template)
        self.response_length = int(rollout.response_length)
        self.model_length = int(
            rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
        )
        self.groups = Groups()
        self.runner = RolloutRunner(config.stack, config.limits)
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


_workers: dict[asyncio.AbstractEventLoop, dict[tuple[int, LoopConfig], Worker]] = {}


def worker_of(config: LoopConfig, server_manager: Any, *arguments: Any) -> Worker:
    """Return the running event loop's worker for a config; made with `arguments` (see `Worker`) on first use."""
    for loop in [loop for loop in _workers if loop.is_closed()]:
        del _workers[loop]
    workers = _workers.setdefault(asyncio.get_running_loop(), {})
    key = (id(server_manager), config)
    if key not in workers:
        workers[key] = Worker(config, server_manager, *arguments)
    return workers[key]
