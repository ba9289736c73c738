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


def label_containers(name: str, *, in_tasks: bool) -> None:
    """Give containers that this server's Docker provider makes a label of this name with their rollout.

    NeMo Gym knows the rollout in whose request it makes a container (`current_rollout_id`). With `in_tasks`, a provider's
    settings that are resolved in a request bear the label too, and so do the containers that a Ray task makes with them.
    Containers that are made with other settings outside of a request get no label.
    """
    registry: Any = importlib.import_module("nemo_gym.sandbox.providers.registry")
    correlation: Any = importlib.import_module("nemo_gym.rollout_correlation")
    Docker: Any = registry.get_provider_class("docker")

    def arguments() -> list[str]:
        key = ROLLOUT_KEY.search(correlation.current_rollout_id() or "")
        return ["--label", f"{name}={rollout_label(key[0])}"] if key else []

    class Labelling(Docker):  # type: ignore[misc]
        async def create(self, spec: Any) -> Any:
            given = spec.provider_options.get("run_args") or ()
            given = [given] if isinstance(given, str) else [*given]
            options = {**spec.provider_options, "run_args": [*given, *arguments()]}
            return await super().create(dataclasses.replace(spec, provider_options=options))

    registry.register_provider("docker", Labelling, override=True)
    if in_tasks:
        _label_settings(arguments)


def _label_settings(arguments: Any) -> None:
    """Add the arguments of `docker run` to every provider's settings that are resolved from now on."""
    package: Any = importlib.import_module("nemo_gym.sandbox")
    module: Any = importlib.import_module("nemo_gym.sandbox.config")
    resolve = module.resolve_provider_config

    def labelled(*args: Any, **kwargs: Any) -> Any:
        found = resolve(*args, **kwargs)
        more = arguments()
        if not more or "docker" not in found:
            return found
        docker = dict(found["docker"] or {})
        create = dict(docker.get("create") or {})
        create["extra_run_args"] = [*(create.get("extra_run_args") or ()), *more]
        return {"docker": {**docker, "create": create}}

    package.resolve_provider_config = module.resolve_provider_config = labelled
