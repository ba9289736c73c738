"""Plans of environments, by their config."""

from __future__ import annotations

from typing import Any

from gymgate.core.config import EnvironmentConfig, JudgeEndpoint, Routing, StackConfig
from gymgate.stack.daemon.plan import EnvironmentPlan


def plan_of(
    config: dict[str, Any],
    *,
    agent: str | None = None,
    routing: Routing | None = None,
    version: str = "0.7.0",
    models: dict[str, JudgeEndpoint] | None = None,
    gateway_host: str | None = None,
) -> EnvironmentPlan:
    """The plan of a resolved config, whose servers have no code."""
    stack = StackConfig(environments=("env",), models=models or {}, gateway_host=gateway_host)
    spec = EnvironmentConfig(name="env", agent=agent, routing=routing)
    return EnvironmentPlan(spec, stack, version, config, {})
