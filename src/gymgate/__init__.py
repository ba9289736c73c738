"""Run NVIDIA NeMo Gym environments from any eval or RL SDK.

    async with gymgate.acquire(gymgate.StackConfig(environments=("mcqa",))) as stack:
        rollout = await stack.run(row, policy=gymgate.HTTPEndpoint(base_url="http://host:8000/v1"))

Everything public is reachable from here and is imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gymgate.api import list_environments, open_rows, replay_endpoint
    from gymgate.collection import CollectedRollout, Pace, collect
    from gymgate.config import (
        CallableEndpoint,
        Endpoint,
        EnvironmentConfig,
        HTTPEndpoint,
        ReplayEndpoint,
        RolloutLimits,
        RuntimeConfig,
        StackConfig,
    )
    from gymgate.dataset import Row
    from gymgate.errors import (
        ConfigError,
        DataError,
        EnvironmentServerError,
        GymgateError,
        MissingExtraError,
        NeedMissingError,
        PolicyError,
        RolloutTimeoutError,
        ServerDiedError,
        SetupError,
        StackLostError,
        StackStartError,
        UnknownConversationError,
    )
    from gymgate.rollout import ModelCall, Outcome, Rollout, RolloutError, Segment, Timing, Usage, outcome_of
    from gymgate.runtime import Runtime, ensure_runtime
    from gymgate.stack import Stack, SyncStack, acquire, acquire_sync, connect

_HOME = {
    "gymgate.api": ["list_environments", "open_rows", "replay_endpoint"],
    "gymgate.collection": ["CollectedRollout", "Pace", "collect"],
    "gymgate.config": [
        "CallableEndpoint",
        "Endpoint",
        "EnvironmentConfig",
        "HTTPEndpoint",
        "ReplayEndpoint",
        "RolloutLimits",
        "RuntimeConfig",
        "StackConfig",
    ],
    "gymgate.dataset": ["Row"],
    "gymgate.errors": [
        "ConfigError",
        "DataError",
        "EnvironmentServerError",
        "GymgateError",
        "MissingExtraError",
        "NeedMissingError",
        "PolicyError",
        "RolloutTimeoutError",
        "ServerDiedError",
        "SetupError",
        "StackLostError",
        "StackStartError",
        "UnknownConversationError",
    ],
    "gymgate.rollout": [
        "ModelCall",
        "Outcome",
        "Rollout",
        "RolloutError",
        "Segment",
        "Timing",
        "Usage",
        "outcome_of",
    ],
    "gymgate.runtime": ["Runtime", "ensure_runtime"],
    "gymgate.stack": ["Stack", "SyncStack", "acquire", "acquire_sync", "connect"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "CallableEndpoint",
    "CollectedRollout",
    "ConfigError",
    "DataError",
    "Endpoint",
    "EnvironmentConfig",
    "EnvironmentServerError",
    "GymgateError",
    "HTTPEndpoint",
    "MissingExtraError",
    "ModelCall",
    "NeedMissingError",
    "Outcome",
    "Pace",
    "PolicyError",
    "ReplayEndpoint",
    "Rollout",
    "RolloutError",
    "RolloutLimits",
    "RolloutTimeoutError",
    "Row",
    "Runtime",
    "RuntimeConfig",
    "Segment",
    "ServerDiedError",
    "SetupError",
    "Stack",
    "StackConfig",
    "StackLostError",
    "StackStartError",
    "SyncStack",
    "Timing",
    "UnknownConversationError",
    "Usage",
    "__version__",
    "acquire",
    "acquire_sync",
    "collect",
    "connect",
    "ensure_runtime",
    "list_environments",
    "open_rows",
    "outcome_of",
    "replay_endpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gymgate' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
