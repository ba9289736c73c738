"""Data that crosses the connection between an SDK process and the daemon: configs, endpoints with their secrets, rollouts.

A rollout is a JSON value and bytes. Each body is in the bytes once, and neither end parses it on the way:

    value  {..., "calls": [{..., "request": 0, "response": 512}, ...], "requests": [[-1, 0, 0, 300], ...], "result": 700}
    bytes  the parts of the requests in order, then the answers of each call, then the agent's result

`requests` describes each `rollout.bodies.Delta` as base, head, tail and length of its part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, SecretStr, TypeAdapter

from gymgate import codec
from gymgate.config import HTTPEndpoint, JudgeEndpoint, ReplayEndpoint, StackConfig
from gymgate.gateway.requests import METADATA_KEY
from gymgate.rollout.bodies import BodyReader, Delta, RecordedBodies
from gymgate.rollout.record import ModelCall, Rollout, RolloutError, Timing, Usage
from gymgate.rollout.result import measured
from gymgate.stack.protocol import Reply

if TYPE_CHECKING:
    from gymgate.gateway.route import Route

_ENDPOINT: TypeAdapter[JudgeEndpoint] = TypeAdapter(JudgeEndpoint)
_ANSWERS = ("response", "upstream_response")


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


def pack_rollout(value: Mapping[str, Any], route: Route, result: bytes | None = None) -> Reply:
    """Return `value` with the calls of a route and the agent's result."""
    parts = [delta.middle for delta in route.requests.deltas]
    calls = []
    for call in route.log:
        fields = {**call.fields(), "request": call.request, "upstream_request": call.upstream_request}
        fields["usage"] = call.usage.__dict__
        for name in _ANSWERS:
            answer: bytes | None = getattr(call, name)
            if answer is not None:
                fields[name] = len(answer)
                parts.append(answer)
        calls.append(fields)
    requests = [[*delta[:3], len(delta.middle)] for delta in route.requests.deltas]
    packed = {**value, "calls": calls, "requests": requests}
    if result is not None:
        packed["result"] = len(result)
        parts.append(result)
    return Reply(packed, b"".join(parts))


def unpack_calls(value: dict[str, Any], body: bytes) -> list[ModelCall]:
    """Return the calls that `pack_rollout` packed. Their bodies are parsed when they are read."""
    return _unpack(value, _Parts(body))


def unpack_rollout(reply: Reply, row: Mapping[str, Any]) -> Rollout:
    """Return the record of a rollout of `row` that the daemon packed. Its parts are not validated again."""
    value, parts = reply.value, _Parts(reply.body)
    fields = {name: value[name] for name in value if name not in ("requests", "result")}
    fields["calls"] = _unpack(value, parts)
    fields["timing"] = Timing.model_construct(**value["timing"])
    if (error := value.get("error")) is not None:
        fields["error"] = RolloutError.model_construct(**error)
    if (length := value.get("result")) is not None:
        fields |= measured(codec.loads(parts.next(length)), row, METADATA_KEY)
    return Rollout.model_construct(**fields)


class _Parts:
    """Takes bytes apart, from the beginning."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def next(self, length: int) -> bytes:
        self._at += length
        return self._body[self._at - length : self._at]


def _unpack(value: Mapping[str, Any], parts: _Parts) -> list[ModelCall]:
    deltas = [Delta(base, head, tail, parts.next(length)) for base, head, tail, length in value["requests"]]
    reader = BodyReader(deltas)
    return [_as_call(call, reader, parts) for call in value["calls"]]


def _as_call(value: dict[str, Any], reader: BodyReader, parts: _Parts) -> ModelCall:
    requests = {name: value.pop(name) for name in ("request", "upstream_request")}
    answers = {name: parts.next(value.pop(name)) for name in _ANSWERS if name in value}
    value["usage"] = Usage.model_construct(**value["usage"])
    return ModelCall.reading_from(RecordedBodies(reader, requests, answers), **value)


def _to_wire(value: BaseModel) -> dict[str, Any]:
    plain: dict[str, Any] = _revealed(value.model_dump(exclude_defaults=True))
    return plain


def _revealed(value: Any) -> Any:
    """The same with secrets in the clear."""
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return {key: _revealed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_revealed(item) for item in value]
    return value
