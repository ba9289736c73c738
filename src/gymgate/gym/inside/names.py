"""Every module of `nemo_gym` that our code uses. A release that moves one gets its new name here, beside the old one."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

MODULES: dict[str, tuple[str, ...]] = {
    "base_resources_server": ("nemo_gym.base_resources_server",),
    "base_responses_api_agent": ("nemo_gym.base_responses_api_agent",),
    "config_types": ("nemo_gym.config_types",),
    "docker_provider": ("nemo_gym.sandbox.providers.docker",),
    "global_config": ("nemo_gym.global_config",),
    "hf_utils": ("nemo_gym.hf_utils",),
    "prompt": ("nemo_gym.prompt",),
    "rollout_correlation": ("nemo_gym.rollout_correlation",),
    "server_utils": ("nemo_gym.server_utils",),
    "task_data": ("nemo_gym.task_data",),  # not in 0.6
    "telemetry_setup": ("nemo_gym.telemetry.setup",),
}
"""Our name of a module to its names in the releases that are supported, newest first."""


def gym_module(name: str) -> Any:
    """Import and return a module of `nemo_gym` by our name. Raises `ModuleNotFoundError` if the release has none of them."""
    *earlier, last = MODULES[name]
    for path in earlier:
        if has_module(path):
            return importlib.import_module(path)
    return importlib.import_module(last)


def has_gym_module(name: str) -> bool:
    """Whether this release has a module, by our name."""
    return any(has_module(path) for path in MODULES[name])


def has_module(path: str) -> bool:
    """Whether a module can be found, parents included."""
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:  # a parent
        return False
