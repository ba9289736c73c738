"""NeMo Gym as a verifiers environment: the taskset, harness and env that `nemo_gym_env` exports.

    vf-eval nemo-gym-env --env.taskset.env mcqa ...
    env = load_environment(env="mcqa")                  # a verifiers.v1.Env, for a trainer

A name is imported when it is first used: it needs verifiers 0.4 and takes the six seconds that verifiers takes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gymgate.integrations.verifiers.requirement import require_verifiers

if TYPE_CHECKING:
    from gymgate.integrations.verifiers.config import NeMoGymConfig
    from gymgate.integrations.verifiers.env import NeMoGymEnv, NeMoGymEnvConfig, load_environment
    from gymgate.integrations.verifiers.harness import NeMoGymHarness, NeMoGymHarnessConfig, RolloutFailed
    from gymgate.integrations.verifiers.task import NeMoGymData, NeMoGymTask
    from gymgate.integrations.verifiers.taskset import NeMoGymTaskset

_MODULE_OF = {
    "NeMoGymConfig": "config",
    "NeMoGymEnv": "env",
    "NeMoGymEnvConfig": "env",
    "load_environment": "env",
    "NeMoGymHarness": "harness",
    "NeMoGymHarnessConfig": "harness",
    "RolloutFailed": "harness",
    "NeMoGymData": "task",
    "NeMoGymTask": "task",
    "NeMoGymTaskset": "taskset",
}

__all__ = [
    "NeMoGymConfig",
    "NeMoGymData",
    "NeMoGymEnv",
    "NeMoGymEnvConfig",
    "NeMoGymHarness",
    "NeMoGymHarnessConfig",
    "NeMoGymTask",
    "NeMoGymTaskset",
    "RolloutFailed",
    "load_environment",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_verifiers()
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
