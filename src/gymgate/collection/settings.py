"""What two runs must share to be one run: everything that can change a reward. Endpoints' addresses cannot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gymgate.collection.plan import Plan
from gymgate.config import (
    DEFAULT_MAX_CALLS,
    CallableEndpoint,
    HTTPEndpoint,
    ReplayEndpoint,
    RolloutLimits,
    StackConfig,
)
from gymgate.stack import Policy


def settings_of(
    stack: StackConfig, policy: Policy, limits: RolloutLimits, sources: Sequence[str]
) -> dict[str, Any]:
    """As JSON values; no key, no header and no address of the policy's enters."""
    return {
        "sources": [_source(source) for source in sources],
        "nemo_gym": stack.runtime.version,
        "environments": [environment.model_dump(mode="json") for environment in stack.environments],
        "judges": {name: _endpoint(endpoint) for name, endpoint in stack.models},
        "policy": _endpoint(policy),
        "limits": {"timeout_s": limits.timeout_s, "max_calls": _max_calls(limits)},
    }


def extent_of(plan: Plan) -> dict[str, Any]:
    """What may grow from one run to the next."""
    seeds = list(plan.seeds) if plan.seeds is not None else None
    return {
        "rollouts": plan.total(),
        "rows": plan.rows,
        "repeats": plan.repeats,
        "seeds": seeds,
        "shard": [plan.shard.index, plan.shard.count],
    }


def _max_calls(limits: RolloutLimits) -> int | str | None:
    """`None` for the default, as runs have it that were made before there was one."""
    return None if limits.max_calls == DEFAULT_MAX_CALLS else limits.max_calls or "no bound"


def _source(source: str) -> str:
    path = Path(source)
    return str(path.resolve()) if path.exists() else source


def _endpoint(endpoint: Any) -> Any:
    if isinstance(endpoint, HTTPEndpoint):
        sampling = dict(endpoint.sampling)
        return {
            "type": "http",
            "model": endpoint.model,
            "dialect": endpoint.dialect,
            "sampling": sampling,
        }
    if isinstance(endpoint, ReplayEndpoint):
        return {
            "type": "replay",
            "rollouts": [_source(path) for path in endpoint.rollouts],
            "index": endpoint.index,
        }
    if isinstance(endpoint, CallableEndpoint):
        return {"type": "callable", "name": endpoint.name}
    if isinstance(endpoint, str):
        return endpoint
    return {"type": "callable", "name": getattr(endpoint, "__qualname__", type(endpoint).__name__)}
