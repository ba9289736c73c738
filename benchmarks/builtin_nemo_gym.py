"""verifiers' own NeMo Gym taskset on one resources server of nemo-gym 0.4.0 (example_single_tool_call), without a Gym agent.

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
    server: str = "resources_servers.example_single_tool_call.app:SimpleWeatherResourcesServer"
    """`module:class` of the resources server; the taskset takes one."""


class BuiltinTaskset(NeMoGymTaskset, vf.Taskset[NeMoGymTask, BuiltinConfig]):  # type: ignore[type-var]
    config: BuiltinConfig

    @property
    def resource_server(self) -> str:  # type: ignore[override]
        return self.config.server
