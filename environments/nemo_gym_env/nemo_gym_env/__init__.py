"""NVIDIA NeMo Gym environments for verifiers: `vf-eval nemo-gym-env --env.taskset.env ENV`.

verifiers finds the plugin by this module's name and reads `__all__`: one taskset, one harness, one env.
"""

from __future__ import annotations

from gymgate.integrations.versions import require

require("nemogym")

from gymgate.integrations.verifiers.harness import NeMoGymEnv, NeMoGymHarness, load_environment  # noqa: E402
from gymgate.integrations.verifiers.taskset import NeMoGymTaskset  # noqa: E402

__all__ = ["NeMoGymEnv", "NeMoGymHarness", "NeMoGymTaskset", "load_environment"]
