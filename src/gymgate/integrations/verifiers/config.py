"""The taskset config: `--env.taskset.*`, `[env.taskset]`, `load_environment(**knobs)`."""

from __future__ import annotations

import verifiers.v1 as vf

from gymgate.integrations.verifiers.knobs import Knobs
from gymgate.integrations.verifiers.requirement import PLUGIN_ID


class NeMoGymConfig(Knobs, vf.TasksetConfig):
    """Which NeMo Gym environment to run, on which rows, and how."""

    id: str = PLUGIN_ID
