"""Data that crosses the connection between an SDK process and the daemon: configs, endpoints with their secrets, rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr, TypeAdapter

from gymgate.core import codec
from gymgate.core.config import HTTPEndpoint, JudgeEndpoint, ReplayEndpoint, StackConfig
from gymgate.rollouts.record import Rollout, RolloutError, Timing, read_calls
from gymgate.stack.protocol import Reply

_ENDPOINT: TypeAdapter[JudgeEndpoint] = TypeAdapter(JudgeEndpoint)


def stack_to_wire(config: StackConfig) -> dict[str, Any]:
    """Return a stack's config as a JSON-serialisable dict, with its endpoints' keys as in this process's environment."""
    plain = _to_wire(config.model_copy(update={"models": ()}))
    plain["models"] = {name: endpoint_to_wire(endpoint) for name, endpoint in config.models}
    return plain


def endpoint_to_wire(endpoint: JudgeEndpoint) -> dict[str, Any] | str:
    """Return an endpoint as JSON, with its key in the clear: for the private connection only.

    Paths become absolute, because the daemon may have another working directory. Raises `ConfigError` if the variable
    of the key is not set.
    """
    if isinstance(endpoint, str):
        return endpoint
    if isinstance(endpoint, ReplayEndpoint):
        files = tuple(str(Path(file).expanduser().absolute()) for file in endpoint.rollouts)
        endpoint = endpoint.model_copy(update={"rollouts": files})
    if isinstance(endpoint, HTTPEndpoint):
        endpoint = endpoint.resolved().model_copy(update={"api_key_env": None})
    return {**_to_wire(endpoint), "type": endpoint.type}


def endpoint_from_wire(value: Mapping[str, Any] | str) -> JudgeEndpoint:
    """Return the endpoint that `endpoint_to_wire` described."""
    return _ENDPOINT.validate_python(value)


def unpack_rollout(reply: Reply) -> Rollout:
    """Return the record of a rollout (`RolloutRun.packed`). Its parts are not validated again."""
    value = codec.loads_own(reply.body)
    value["calls"] = read_calls(value)
    del value["requests"]
    value["timing"] = Timing.model_construct(**value["timing"])
    if (error := value.get("error")) is not None:
        value["error"] = RolloutError.model_construct(**error)
    return Rollout.model_construct(**value)


def _to_wire(value: BaseModel) -> dict[str, Any]:
    plain: dict[str, Any] = reveal(value.model_dump(exclude_defaults=True))
    return plain


def reveal(value: Any) -> Any:
    """Return plain values with their secrets in the clear."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return {key: reveal(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [reveal(item) for item in value]
    return value
