"""Every name of `nemo_gym` that our code uses, and where releases have it. A release that moves one gets a place here.

python names.py [NAME...]     imports these names, or all; prints a line for each that the release lacks, and fails then
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

PLACES: dict[str, tuple[str, ...]] = {
    "BaseRunRequest": ("nemo_gym.server_runtime.base_resources_server", "nemo_gym.base_resources_server"),
    "DockerProvider": ("nemo_gym.sandbox.providers.docker",),
    "DownloadJsonlDatasetHuggingFaceConfig": ("nemo_gym.config.config_types", "nemo_gym.config_types"),
    "GlobalConfigDictParser": ("nemo_gym.config.global_config", "nemo_gym.global_config"),
    "GlobalConfigDictParserConfig": ("nemo_gym.config.global_config", "nemo_gym.global_config"),
    "NEMO_GYM_RESERVED_TOP_LEVEL_KEYS": ("nemo_gym.config.global_config", "nemo_gym.global_config"),
    "SimpleResponsesAPIAgent": (
        "nemo_gym.agents.base_responses_api_agent",
        "nemo_gym.base_responses_api_agent",
    ),
    "SimpleServer": ("nemo_gym.server_runtime.base_server", "nemo_gym.server_utils"),
    "TaskDataSchemaError": ("nemo_gym.data.task_data", "nemo_gym.task_data"),
    "TaskDataValidator": ("nemo_gym.data.task_data", "nemo_gym.task_data"),
    "legacy_metadata_fields": ("nemo_gym.data.task_data", "nemo_gym.task_data"),
    "normalize_task_fields": ("nemo_gym.data.task_data", "nemo_gym.task_data"),
    "apply_prompt_to_row": ("nemo_gym.data.prompt", "nemo_gym.prompt"),
    "configure_telemetry_env": ("nemo_gym.telemetry.setup",),
    "current_rollout_id": ("nemo_gym.core.episode_context", "nemo_gym.rollout_correlation"),
    "download_hf_dataset_as_jsonl": ("nemo_gym.data.hf_utils", "nemo_gym.hf_utils"),
    "find_server_dir": ("nemo_gym.data.task_data", "nemo_gym.task_data"),
    "initialize_ray": ("nemo_gym.server_runtime.ray_support", "nemo_gym.server_utils"),
    "load_prompt_config": ("nemo_gym.data.prompt", "nemo_gym.prompt"),
    "load_task_data_schema": ("nemo_gym.data.task_data", "nemo_gym.task_data"),
    "resolve_dataset_agent": ("nemo_gym.config.global_config", "nemo_gym.global_config"),
    "rollout_context": ("nemo_gym.core.episode_context", "nemo_gym.rollout_correlation"),
    "telemetry_config_from_global_config": ("nemo_gym.telemetry.setup",),
}
"""Name to the modules that have it, newest release first. The first of two is where the documentation of the next release has
it (last read on 2026-11-28; tried with stubs only), the last where 0.6 and 0.7 have it."""
PRELOADED = ("BaseRunRequest", "GlobalConfigDictParser", "SimpleResponsesAPIAgent", "SimpleServer")
"""Names in the modules that every server imports."""


def gym_symbol(name: str) -> Any:
    """Import and return a name of `nemo_gym`. Raises `ImportError` if the release has it in none of its places."""
    return getattr(gym_place(name), name)


def gym_place(name: str) -> Any:
    """Import and return the module that has a name of `nemo_gym`. Raises `ImportError` if there is none."""
    for path in PLACES[name]:
        if has_module(path) and hasattr(module := importlib.import_module(path), name):
            return module
    importlib.import_module(PLACES[name][-1])  # which tells what is missing if all of it is
    raise ImportError(f"this release of nemo-gym has no {name} in {' or '.join(PLACES[name])}", name=name)


def has_module(path: str) -> bool:
    """Whether a module can be found, parents included."""
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:  # a parent
        return False


def main(names: list[str]) -> int:
    """Print why these names, or all, cannot be imported, a line each. Return 1 if there is one."""
    failed = 0
    for name in names or PLACES:
        try:
            gym_place(name)
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
