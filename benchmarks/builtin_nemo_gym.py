"""verifiers' own NeMo Gym taskset on example_single_tool_call: one resources server, no Gym agent.

`vf-eval builtin-nemo-gym` with this directory on PYTHONPATH. It makes a script environment with nemo-gym 0.4.0 by uv, so
it needs uv on PATH and an interpreter (3.12 or 3.13) that uv finds or that UV_PYTHON names.
"""

from __future__ import annotations

from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.tasksets.nemo_gym import NeMoGymConfig, NeMoGymEnv, NeMoGymTask, NeMoGymTaskset

__all__ = ["BuiltinTaskset", "NeMoGymEnv"]


class BuiltinConfig(NeMoGymConfig):
    dataset: Path = Path("example.jsonl")


class BuiltinTaskset(NeMoGymTaskset, vf.Taskset[NeMoGymTask, BuiltinConfig]):
    resource_server = "resources_servers.example_single_tool_call.app:SimpleWeatherResourcesServer"
