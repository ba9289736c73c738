"""What is asked for, and the order that the program in NeMo Gym's interpreter gets for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from gymgate.catalog import EnvConfig, Environment
from gymgate.config import Config, EnvironmentConfig, RuntimeConfig
from gymgate.errors import ConfigError, SetupError
from gymgate.runtime import Runtime
from gymgate.runtime.environment import clean_env, offline
from gymgate.runtime.installer import find_uv
from gymgate.stack import gym_config

DEFAULT_TOKEN_ENV = "HF_TOKEN"
STAGE = ".stage"
"""Directory in a workspace where files are until all are complete."""
Split = Literal["train", "validation", "benchmark", "example"]


class PrepareConfig(Config):
    """Which data to prepare, and how."""

    environment: EnvironmentConfig
    """Its config, agent and overrides count, as for a stack."""
    runtime: RuntimeConfig = RuntimeConfig()
    """nemo-gym release whose preparation is run."""
    splits: tuple[Split, ...] = ("train", "validation", "benchmark")
    """Kinds of declared datasets to prepare; each gets a file."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of the dataset's own `prepare()`."""
    script: str | None = None
    """A script of the environment to run in place of what its config declares."""
    script_arguments: tuple[str, ...] = ()
    """Its command line; alone, they are for the only script that the environment has."""
    input: str | None = None
    """A JSONL file of your own in place of what the config declares."""
    prompt: str | None = None
    """Prompt file (YAML: `user`, perhaps `system`) that rows are put to in place of the declared one."""
    requirements: tuple[str, ...] = ()
    """Packages that a script needs and does not declare."""
    token_env: str = DEFAULT_TOKEN_ENV
    """Environment variable with the hub's token, passed on if it is set."""
    env_vars: tuple[str, ...] = ()
    """Names of further environment variables that a script may see."""
    skip_bad: bool = False
    """Leave out rows that cannot run, in place of an error."""
    refresh: bool = False
    """Fetch again what was fetched earlier."""
    timeout_s: float = Field(default=14400.0, gt=0)
    """Seconds for everything, downloads included; making a runtime is not counted."""


def order_for(
    config: PrepareConfig, environment: Environment, chosen: EnvConfig, runtime: Runtime, place: Path
) -> dict[str, Any]:
    """The order, as JSON: which config, which data of it, and where to work."""
    user = environment.kind == "config"
    roots = gym_config.component_roots(chosen.path, (), runtime.site)[:-1] if user else []
    return {
        "workspace": str(place),
        "stage": str(place / STAGE),
        "site": str(runtime.site),
        "roots": [str(root) for root in roots],
        "directory": str(_directory(environment, chosen, roots, runtime)),
        "parse": gym_config.parse_order(
            _in(runtime, chosen.path), config.environment.overrides, place / "results", place / "cache"
        ),
        "types": list(config.splits),
        "type": config.splits[0],
        "arguments": dict(config.arguments),
        "script": config.script,
        "script_arguments": list(config.script_arguments),
        "input": str(Path(config.input).expanduser().absolute()) if config.input else None,
        "prompt": _prompt(config.prompt),
        "agent": config.environment.agent,
        "refresh": config.refresh,
    }


def _in(runtime: Runtime, path: Path) -> Path:
    """A packaged file in another runtime of the same release."""
    parts = path.parts
    if "site-packages" not in parts:
        return path
    there = runtime.site.joinpath(*parts[parts.index("site-packages") + 1 :])
    return there if there.exists() else path


def _directory(environment: Environment, chosen: EnvConfig, roots: Iterable[Path], runtime: Runtime) -> Path:
    """Where an environment's scripts are: a packaged one's directory, or that of a user's resources server."""
    if environment.kind != "config":
        return _in(runtime, environment.path)
    for server in chosen.servers:
        for root in roots:
            if (root / server.kind / server.type).is_dir():
                return root / server.kind / server.type
    return chosen.path.parent


def _prompt(name: str | None) -> str | None:
    """A prompt file of the user's, or one that the release has."""
    return str(Path(name).absolute()) if name and Path(name).is_file() else name


def program_env(config: PrepareConfig) -> dict[str, str]:
    """What the program sees of the environment; the hub's cache is the user's own, not one in the release."""
    kept = clean_env(config.env_vars)
    if token := os.environ.get(config.token_env):
        kept["HF_TOKEN"] = token
    elif config.token_env != DEFAULT_TOKEN_ENV:
        raise ConfigError(f"environment variable {config.token_env!r} is not set (--token-var)")
    home = Path(kept.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    kept.setdefault("HF_HOME", str(home))
    kept.setdefault("HF_DATASETS_CACHE", str(Path(kept["HF_HOME"]) / "datasets"))
    kept |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with contextlib.suppress(SetupError):  # some scripts call uv
        kept["PATH"] = os.pathsep.join(filter(None, (kept.get("PATH"), str(find_uv().parent))))
    if offline():
        kept |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return kept
