"""What NeMo Gym's parser is asked about an environment's config, and what it answers.

The parser runs in a child of the fork server; see `gym.inside.resolve`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gymgate.core.config import POLICY
from gymgate.core.errors import ConfigError, NeedMissingError
from gymgate.core.http_client import LOOPBACK
from gymgate.gym.inside.resolve import NOWHERE, Node

_NO_VARIABLE = re.compile(r"Environment variable '(?P<name>\w+)' not found")


def parse_order(
    config_files: Iterable[Path],
    overrides: Iterable[tuple[str, Any]],
    results_dir: Path,
    cache_dir: Path,
    sandbox: str | None = None,
) -> dict[str, Any]:
    """Return the order for `gym.inside.resolve.resolve`: config files, overrides and a policy that is never called.

    `sandbox` is the provider that `gym.catalog.sandboxes.choose_provider` is going to put in.
    """
    initial = {
        "policy_base_url": NOWHERE,
        "policy_api_key": "gymgate",
        "policy_model_name": "policy",
        "head_server": {"host": LOOPBACK, "port": 1},
        "default_host": LOOPBACK,
        # 0: unlimited. An agent calls itself once per rollout, and NeMo Gym allows 1,024 connections to one host.
        "global_aiohttp_connector_limit_per_host": 0,
        # It puts the rollout's key into the URLs of model calls.
        "observability_enabled": True,
        "allow_unsupported_pairing": True,
        "results_dir": str(results_dir),
        "cache_dir": str(cache_dir),
    }
    return {
        "policy": POLICY,
        "config_paths": [str(path) for path in config_files],
        "sandbox": sandbox,
        "overrides": [list(pair) for pair in overrides],
        "initial": initial,
    }


def checked_config(answer: Mapping[str, Any], environment: str) -> Node:
    """Return the resolved config in the parser's answer.

    Raises `NeedMissingError` with the keys that the user must give, `ConfigError` for anything else that
    Gym's parser objects to.
    """
    if missing := answer.get("missing"):
        keys = ", ".join(missing)
        raise NeedMissingError(
            f"environment {environment!r} needs a value for {keys}; give it with "
            f"--set {missing[0]}=VALUE, or in Python as "
            f'EnvironmentConfig(name={environment!r}, overrides=(("{missing[0]}", ...),))',
            environment=environment,
            need=keys,
        )
    if unknown := answer.get("unknown"):
        raise ConfigError(f"environment {environment!r}: {unknown}")
    if error := answer.get("error"):
        message = f"NeMo Gym cannot read the config of {environment!r}: {' '.join(str(error).split())}"
        if variable := _NO_VARIABLE.search(str(error)):  # servers see only those that are named
            name = variable["name"]
            message += f"; set {name} and give it with --env-var {name}, or in Python as StackConfig(env_vars=({name!r},))"
        raise ConfigError(message)
    config: Node = answer["config"]
    return config
