"""What one of verl's agent-loop workers keeps between rollouts. verl makes an agent loop per rollout; this outlives it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, model_validator

from gymgate.config import Config, EnvironmentConfig, RolloutLimits, RuntimeConfig, StackConfig
from gymgate.errors import ConfigError, MissingExtraError
from gymgate.integrations.training.attempts import Attempts
from gymgate.integrations.training.figures import Attempt
from gymgate.tokens import TokenPolicy
from gymgate.tokens.conversation import Renderer
from gymgate.tokens.engines import ServerManagerEngine
from gymgate.tokens.sampling import NAMES

logger = logging.getLogger(__name__)

Key = tuple[int, str]


class LoopConfig(Config):
    """An entry of the file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names, beside `name` and `_target_`."""

    environments: tuple[str | EnvironmentConfig, ...] = Field(min_length=1)
    """Environments of the stack: packaged names, paths to configs of your own, or `EnvironmentConfig`s. Rows name theirs."""
    renderer: dict[str, Any] | None = None
    """Config of the `renderers` package (`{name: qwen3}`), or only its name; `None`: by the tokenizer's name or path."""
    limits: RolloutLimits = RolloutLimits(timeout_s=1800)
    """Bounds on one rollout."""
    runtime: RuntimeConfig = RuntimeConfig()
    """The nemo-gym release and the interpreter it runs in."""
    stack: dict[str, Any] = Field(default_factory=dict)
    """Further fields of `StackConfig`: `models` for judges, `env_vars`, `agent_processes`, `linger_s`."""
    score_truncated: bool = False
    """Whether rollouts that a limit ended are trained on with the reward they got; else they teach nothing."""

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, value: dict[str, Any]) -> dict[str, Any]:
        environments, renderer = value.get("environments"), value.get("renderer")
        return {
            **value,
            **({"environments": (environments,)} if isinstance(environments, str) else {}),
            **({"renderer": {"name": renderer}} if isinstance(renderer, str) else {}),
        }

    @model_validator(mode="after")
    def _makes_a_stack(self) -> Self:
        self.stack_config()
        return self

    def stack_config(self) -> StackConfig:
        """One stack for all agent-loop workers of a machine, unless `stack` says otherwise."""
        return StackConfig(
            environments=self.environments,
            runtime=self.runtime,
            **{"share": "machine", **self.stack},
        )


class Worker:
    """One worker's stack, renderer and policies; for the event loop that it was made on."""

    def __init__(
        self,
        config: LoopConfig,
        server_manager: Any,
        tokenizer: Any,
        rollout: Any,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        """`rollout` is verl's `actor_rollout_ref.rollout`, `template` its `data.apply_chat_template_kwargs`."""
        self.config = config
        self.server_manager = server_manager
        self.renderer = make_renderer(tokenizer, config.renderer, template)
        self.response_length = int(rollout.response_length)
        self.model_length = int(
            rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
        )
        self.groups = Groups()
        self._attempts = Attempts(config.stack_config(), config.limits)
        self._policies: dict[tuple[Any, ...], TokenPolicy] = {}

    async def attempt(self, environment: str, row: Mapping[str, Any], sampling: Mapping[str, Any]) -> Attempt:
        """One rollout, sampled with the parameters that verl set for it. A failure comes back as data."""
        return await self._attempts.attempt(environment, row, self.policy(sampling))

    async def close(self) -> None:
        """Give the stack back."""
        await self._attempts.close()

    def policy(self, sampling: Mapping[str, Any]) -> TokenPolicy:
        """One per set of parameters (training, validation), so that rows that ask for others are reported once."""
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


@dataclass
class Group:
    """The sessions of one prompt, which verl runs in one worker."""

    open: int = 0
    """Sessions that have not ended."""
    gave_output: bool = False
    """Whether one of them gave verl an output."""


class Groups:
    """Groups with an open session."""

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


_workers: dict[asyncio.AbstractEventLoop, dict[Key, Worker]] = {}


def worker_of(config: LoopConfig, server_manager: Any, *making: Any) -> Worker:
    """The running event loop's worker for a config; made with `making` (see `Worker`) on first use."""
    for loop in [loop for loop in _workers if loop.is_closed()]:
        del _workers[loop]
    workers = _workers.setdefault(asyncio.get_running_loop(), {})
    key = (id(server_manager), config.model_dump_json())
    if key not in workers:
        workers[key] = Worker(config, server_manager, *making)
    return workers[key]


def workers_here() -> list[Worker]:
    """Those of the running event loop."""
    return [*_workers.get(asyncio.get_running_loop(), {}).values()]


def make_renderer(
    tokenizer: Any, wanted: Mapping[str, Any] | None, template: Mapping[str, Any] | None = None
) -> Renderer:
    """The renderer that `wanted` describes, or the one that the `renderers` package knows for a tokenizer."""
    try:
        from pydantic import TypeAdapter
        from renderers import RendererConfig, create_renderer
    except ImportError as error:
        raise MissingExtraError("renderers is not installed: pip install 'gymgate[verl]'") from error
    try:
        chosen = None if wanted is None else TypeAdapter(RendererConfig).validate_python(dict(wanted))
        made: Renderer = create_renderer(tokenizer, chosen, chat_template_kwargs=dict(template or {}) or None)
    except Exception as error:  # the library raises its own, pydantic's and the hub's
        first = str(error).strip().split("\n", 1)[0]
        raise ConfigError(
            f"no renderer for {_name_of(tokenizer)!r}: {type(error).__name__}: {first}"
        ) from error
    if wanted is None and type(made).__name__ == "DefaultRenderer":
        logger.warning(
            "no renderer is known for %r, so no tool call is parsed and every turn is rendered anew;"
            " set `renderer: {name: ...}` in the agent loop's config",
            _name_of(tokenizer),
        )
    return made


def _name_of(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", type(tokenizer).__name__))
