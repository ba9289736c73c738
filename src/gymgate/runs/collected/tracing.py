"""What a run tells whoever traces its rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gymgate.core.config import POLICY, HTTPEndpoint, JudgeEndpoint
from gymgate.rollouts import Rollout
from gymgate.stack import Policy


class Tracer(Protocol):
    """Takes finished rollouts; `gymgate.RolloutTracer` exports them as spans."""

    def record(self, rollout: Rollout, *, models: Mapping[str, str] | None = None) -> None:
        """Take a rollout that finished or failed permanently. `models` are names of models by model server."""


def models_of(policy: Policy, judges: Mapping[str, JudgeEndpoint]) -> dict[str, str]:
    """Return the names of the models that endpoints are configured with, by model server."""
    endpoints = {POLICY: policy, **judges}
    asked = {name: policy if endpoint == "policy" else endpoint for name, endpoint in endpoints.items()}
    return {
        name: endpoint.model
        for name, endpoint in asked.items()
        if isinstance(endpoint, HTTPEndpoint) and endpoint.model
    }
