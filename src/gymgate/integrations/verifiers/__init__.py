"""NeMo Gym as a verifiers environment: the taskset, harness and env that `nemo_gym_env` exports.

    vf-eval nemo-gym-env --env.taskset.env mcqa ...
    env = load_environment(env="mcqa")                  # a verifiers.v1.Env, for a trainer

Importing this needs verifiers 0.4 and takes the six seconds that verifiers takes.
"""

from __future__ import annotations

from gymgate.integrations.verifiers.requirement import require_verifiers

require_verifiers()

from gymgate.integrations.verifiers.config import NeMoGymConfig  # noqa: E402
from gymgate.integrations.verifiers.env import (  # noqa: E402
    NeMoGymEnv,
    NeMoGymEnvConfig,
    load_environment,
)
from gymgate.integrations.verifiers.harness import (  # noqa: E402
    NeMoGymHarness,
    NeMoGymHarnessConfig,
    RolloutFailed,
)
from gymgate.integrations.verifiers.task import NeMoGymData, NeMoGymTask  # noqa: E402
from gymgate.integrations.verifiers.taskset import NeMoGymTaskset  # noqa: E402

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
