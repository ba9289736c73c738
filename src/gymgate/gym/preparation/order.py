"""The order and the environment variables for the program that runs in NeMo Gym's interpreter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gymgate.core.errors import ConfigError, SetupError
from gymgate.gym.catalog import EnvConfig, Environment
from gymgate.gym.gym_config import parse_order
from gymgate.gym.preparation.manifest import DEFAULT_TOKEN_ENV, PrepareConfig
from gymgate.gym.runtime import Runtime
from gymgate.gym.runtime.uv import find_uv
from gymgate.gym.runtime.variables import clean_env, offline
from gymgate.gym.server_code import component_roots

STAGE = ".stage"
"""Directory in a workspace where files are until all are complete."""


def order_for(
    config: PrepareConfig, environment: Environment, chosen: EnvConfig, runtime: Runtime, workspace: Path
) -> dict[str, Any]:
    """The order, as JSON: which config, which data of it, and where to work."""
    user = environment.kind == "config"
    roots = component_roots(chosen.all_files, (), runtime.site)[:-1] if user else []
    is_own_prompt = config.prompt is not None and Path(config.prompt).is_file()
    return {
        "workspace": str(workspace),
        "stage": str(workspace / STAGE),
        "site": str(runtime.site),
        "editable": config.runtime.interpreter is not None,
        "roots": [str(root) for root in roots],
        "directory": str(_directory(environment, chosen, roots, runtime)),
        "parse": parse_order(
            [_in_runtime(runtime, path) for path in chosen.all_files],
            config.environment.overrides,
            workspace / "results",
            workspace / "cache",
        ),
        "types": list(config.splits),
        "type": config.splits[0],
        "arguments": dict(config.arguments),
        "script": config.script,
        "script_arguments": list(config.script_arguments),
        "input": str(Path(config.input).expanduser().absolute()) if config.input else None,
        "rename": dict(config.rename),
        "prompt": str(Path(config.prompt).absolute()) if config.prompt and is_own_prompt else config.prompt,
        "agent": config.environment.agent,
        "refresh": config.refresh,
    }


def _in_runtime(runtime: Runtime, path: Path) -> Path:
    """A packaged file in another runtime of the same release."""
    _, separator, below = path.as_posix().partition("/site-packages/")
    there = runtime.site / below
    return there if separator and there.exists() else path


def _directory(environment: Environment, chosen: EnvConfig, roots: Iterable[Path], runtime: Runtime) -> Path:
    """Where an environment's scripts are: a packaged one's directory, or that of a user's resources server."""
    if environment.kind != "config":
        return _in_runtime(runtime, environment.path)
    servers = (root / server.kind / server.type for server in chosen.servers for root in roots)
    return next((path for path in servers if path.is_dir()), chosen.path.parent)


def program_env(config: PrepareConfig) -> dict[str, str]:
    """The program's environment variables: the named ones, the hub's token, and the user's own hub cache."""
    env = clean_env(config.env_vars)
    if token := os.environ.get(config.token_env):
        env["HF_TOKEN"] = token
    elif config.token_env != DEFAULT_TOKEN_ENV:
        raise ConfigError(f"environment variable {config.token_env!r} is not set (--token-var)")
    cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    env.setdefault("HF_HOME", str(cache / "huggingface"))
    env.setdefault("HF_DATASETS_CACHE", str(Path(env["HF_HOME"]) / "datasets"))
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with contextlib.suppress(SetupError):  # some scripts call uv
        env["PATH"] = os.pathsep.join(filter(None, (env.get("PATH"), str(find_uv().parent))))
    if offline():
        env |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return env
