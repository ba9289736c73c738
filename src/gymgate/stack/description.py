"""What a stack says of itself: the settings that decide its rewards, and the one name of each environment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gymgate.core.config import CallableEndpoint, EnvironmentConfig, HTTPEndpoint, ReplayEndpoint, StackConfig
from gymgate.core.http_client import HTTPClient, Response
from gymgate.core.json_server import listed_models, probe
from gymgate.gateway.backends.http import request_headers
from gymgate.gym.catalog import Catalog, Environment
from gymgate.stack.content import environment_content, file_digest, source_digest


def stack_settings(
    config: StackConfig, catalog: Catalog, environments: Mapping[str, Environment]
) -> dict[str, Any]:
    """Return the settings of a stack that can change a reward, as JSON values, without keys and addresses.

    `environments` are those of the config, as `Catalog.environments_of` returns them.
    """
    interpreter = config.runtime.interpreter
    return {
        "nemo_gym": catalog.version,
        "interpreter": None if interpreter is None else str(Path(interpreter).expanduser().absolute()),
        "environments": [
            _environment(name, spec, environment, config, catalog)
            for spec, (name, environment) in zip(config.environments, environments.items(), strict=True)
        ],
        "judges": {name: endpoint_settings(endpoint) for name, endpoint in config.models},
    }


def endpoint_settings(endpoint: Any) -> Any:
    """Return the settings of a policy or a judge as JSON values, without key, headers and address."""
    if isinstance(endpoint, HTTPEndpoint):
        return {
            "type": "http",
            "model": endpoint.model,
            "dialect": endpoint.dialect,
            "sampling": dict(endpoint.sampling),
            **({"strict_tools": True} if endpoint.strict_tools else {}),
            **({"system_messages": "join"} if endpoint.system_messages == "join" else {}),
        }
    if isinstance(endpoint, ReplayEndpoint):
        return {
            "type": "replay",
            "rollouts": [_replayed(Path(path).expanduser()) for path in endpoint.rollouts],
            "index": endpoint.index,
        }
    if isinstance(endpoint, CallableEndpoint):
        return {"type": "callable", "name": endpoint.name}
    if isinstance(endpoint, str):
        return endpoint
    name = getattr(endpoint, "__qualname__", type(endpoint).__name__)
    return {"type": "callable", "name": name, "source": source_digest(endpoint)}


def resolved_source(source: str) -> str:
    """Return the absolute path of a file that is there; any other name as it is."""
    path = Path(source)
    return str(path.resolve()) if path.exists() else source


async def served_models(config: StackConfig) -> dict[str, str]:
    """Return the model that each judge's endpoint serves, where no model is chosen and it lists exactly one."""
    unnamed = [
        (name, endpoint)
        for name, endpoint in config.models
        if isinstance(endpoint, HTTPEndpoint) and endpoint.model is None
    ]
    async with HTTPClient() as client:
        lists = await asyncio.gather(*(_listed(endpoint, client) for _, endpoint in unnamed))
    return {name: models.pop() for (name, _), models in zip(unnamed, lists, strict=True) if len(models) == 1}


async def _listed(endpoint: HTTPEndpoint, client: HTTPClient) -> set[str]:
    """Return the models that the replicas of an endpoint list."""
    answers = await asyncio.gather(
        *(probe(f"{url}/models", client, request_headers(endpoint, url)) for url in endpoint.base_urls)
    )
    lists = (listed_models(answer) for answer in answers if isinstance(answer, Response))
    return {model["id"] for models in lists for model in models or ()}


def _replayed(path: Path) -> str:
    """A file by its name and content, so that it may move; anything else by its name."""
    return f"{path.name} ({file_digest(path)})" if path.is_file() else str(path)


def _environment(
    name: str, spec: EnvironmentConfig, environment: Environment, config: StackConfig, catalog: Catalog
) -> dict[str, Any]:
    """Settings that differ from their defaults, those that a run has always held, and the content of a user's own files."""
    environment_config = environment.config(spec.config)
    content = environment_content(environment_config, config.component_roots, catalog.site)
    if spec.sandbox is not None and (file := Path(spec.sandbox).expanduser()).is_file():
        content["sandbox"] = file_digest(file)
    return {
        **spec.model_dump(mode="json", include={"agent", "overrides"}),
        **spec.model_dump(mode="json", exclude_defaults=True),
        "config": environment_config.name if spec.config is not None else None,
        "name": name,
        **({"content": content} if content else {}),
    }
