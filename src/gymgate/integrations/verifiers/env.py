"""The env: owns the lease on the Gym stack for as long as verifiers serves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf

from gymgate.config import StackConfig
from gymgate.integrations.verifiers import leases
from gymgate.integrations.verifiers.config import NeMoGymConfig
from gymgate.integrations.verifiers.requirement import DEFAULT_ENVIRONMENT, PLUGIN_ID
from gymgate.integrations.verifiers.taskset import find_environments


class NeMoGymEnvConfig(vf.SingleAgentEnvConfig):
    """The single-agent env with the local runtime: nothing of a rollout runs in it."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class NeMoGymEnv(vf.SingleAgentEnv, vf.Env[NeMoGymEnvConfig]):
    """One Gym agent per task. The stack is up before the first rollout and gone after the last."""

    _held: StackConfig | None = None

    async def start(self) -> None:
        """Start the stack, or join one that is up; raises the stack's error, one line, if it cannot."""
        config = self.taskset.config
        if not isinstance(config, NeMoGymConfig):
            raise TypeError(f"nemo-gym-env runs its own taskset, not {type(self.taskset).__name__}")
        self._held = config.stack_config()
        await leases.hold(self._held)

    async def stop(self) -> None:
        """Give the lease back; after a start that failed or was cut off, too."""
        held, self._held = self._held, None
        if held is not None:
            await leases.release(held)


def load_environment(
    env: str | list[str] = DEFAULT_ENVIRONMENT,
    *,
    env_config: Mapping[str, Any] | None = None,
    **config: Any,
) -> vf.Env[Any]:
    """A verifiers env for a trainer: `load_environment(env="mcqa", data="train.jsonl", max_calls=20)`.

    `config` are the taskset's knobs (`NeMoGymConfig`); `env_config` is the rest of verifiers' `[env]` block
    (`{"agent": {"max_turns": 8}, "retries": ...}`). Raises `ConfigError`, with near names, for an environment
    that does not exist; installs nemo-gym if it is not there.
    """
    taskset = NeMoGymConfig(env=env, **config)
    find_environments(taskset)
    return vf.load_environment(
        vf.resolve_env_config({**(env_config or {}), "taskset": {**taskset.model_dump(), "id": PLUGIN_ID}})
    )
