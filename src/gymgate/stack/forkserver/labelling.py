"""Which rollout a Docker container belongs to: a label that NeMo Gym's provider gives it. Imports nothing of gymgate."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import re
from typing import Any

ROLLOUT_KEY = re.compile(r"\b[0-9a-f]{32}\b")


def rollout_label(key: str) -> str:
    """Return what a rollout's containers are labelled with: labels are no secret, the key is."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def label_containers(name: str) -> None:
    """Give containers that this server's Docker provider makes a label of this name with their rollout.

    NeMo Gym knows the rollout in whose request it makes a container (`current_rollout_id`). Containers that are made
    outside of a request, or in a Ray task, get no label.
    """
    registry: Any = importlib.import_module("nemo_gym.sandbox.providers.registry")
    correlation: Any = importlib.import_module("nemo_gym.rollout_correlation")
    Docker: Any = registry.get_provider_class("docker")

    class Labelling(Docker):  # type: ignore[misc]
        async def create(self, spec: Any) -> Any:
            if key := ROLLOUT_KEY.search(correlation.current_rollout_id() or ""):
                given = spec.provider_options.get("run_args") or ()
                arguments = [given] if isinstance(given, str) else [*given]
                arguments += ["--label", f"{name}={rollout_label(key[0])}"]
                options = {**spec.provider_options, "run_args": arguments}
                spec = dataclasses.replace(spec, provider_options=options)
            return await super().create(spec)

    registry.register_provider("docker", Labelling, override=True)
