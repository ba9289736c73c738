"""What crosses the connection beside plain JSON: configs and endpoints, with the secrets they hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr, TypeAdapter

from gymgate.config import HTTPEndpoint, JudgeEndpoint, ReplayEndpoint, StackConfig

_ENDPOINT: TypeAdapter[JudgeEndpoint] = TypeAdapter(JudgeEndpoint)


def to_wire(value: BaseModel) -> dict[str, Any]:
    """As a JSON-serialisable dict, secrets in the clear: for the private connection only."""
    plain: dict[str, Any] = _revealed(value.model_dump(exclude_defaults=True))
    if "type" in type(value).model_fields:
        plain["type"] = value.type  # type: ignore[attr-defined]
    return plain


def stack_to_wire(config: StackConfig) -> dict[str, Any]:
    """A stack's config, its endpoints' keys read from this process's environment."""
    plain = to_wire(config.model_copy(update={"models": ()}))
    plain["models"] = {name: endpoint_to_wire(endpoint) for name, endpoint in config.models}
    return plain


def endpoint_to_wire(endpoint: JudgeEndpoint) -> dict[str, Any] | str:
    """An endpoint, its key read from this process's environment; `ConfigError` if that is not set.

    Paths become absolute: the daemon may have another working directory.
    """
    if isinstance(endpoint, str):
        return endpoint
    if isinstance(endpoint, ReplayEndpoint):
        files = tuple(str(Path(file).expanduser().absolute()) for file in endpoint.rollouts)
        endpoint = endpoint.model_copy(update={"rollouts": files})
    if isinstance(endpoint, HTTPEndpoint):
        endpoint = endpoint.resolved().model_copy(update={"api_key_env": None})
    return to_wire(endpoint)


def endpoint_from_wire(value: Mapping[str, Any] | str) -> JudgeEndpoint:
    return _ENDPOINT.validate_python(value)


def _revealed(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return {key: _revealed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_revealed(item) for item in value]
    return value
