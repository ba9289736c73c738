"""How a rollout gets from the daemon to the SDK process: what is said of it as JSON, and every body once, as bytes.

    value  {..., "calls": [{..., "request": 0, "response": 512}, ...], "requests": [[-1, 0, 0, 300], ...], "result": 700}
    bytes  the requests' parts in order, then each call's answers, then the agent's result

`requests` describes `rollout.bodies.Delta`s by their numbers and lengths. Nothing is parsed or written again on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gymgate import codec
from gymgate.gateway.requests import METADATA_KEY
from gymgate.rollout.bodies import BodyReader, Delta, RecordedBodies
from gymgate.rollout.record import ModelCall, Rollout, RolloutError, Timing, Usage
from gymgate.rollout.result import measured
from gymgate.stack.protocol import Reply

if TYPE_CHECKING:
    from gymgate.gateway import Route

_ANSWERS = ("response", "upstream_response")


def pack_calls(value: Mapping[str, Any], route: Route, result: bytes | None = None) -> Reply:
    """`value` with a route's calls and the agent's result."""
    parts = [delta.middle for delta in route.requests.deltas]
    calls = []
    for call in route.log:
        fields = call.fields()
        fields["usage"] = call.facts.usage.__dict__
        fields["request"], fields["upstream_request"] = call.request, call.upstream_request
        for name in _ANSWERS:
            answer: bytes | None = getattr(call, name)
            if answer is not None:
                fields[name] = len(answer)
                parts.append(answer)
        calls.append(fields)
    described = {
        **value,
        "calls": calls,
        "requests": [[*delta[:3], len(delta.middle)] for delta in route.requests.deltas],
    }
    if result is not None:
        described["result"] = len(result)
        parts.append(result)
    return Reply(described, b"".join(parts))


def unpack_calls(value: Mapping[str, Any], body: bytes) -> list[ModelCall]:
    """The calls of `pack_calls`, whose bodies are parsed when they are read."""
    return _unpack(value, _Parts(body))


def unpack_rollout(reply: Reply, row: Mapping[str, Any]) -> Rollout:
    """The record of a rollout of `row` that the daemon packed; its parts are trusted, not validated again."""
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
    reader = BodyReader(
        [Delta(base, head, tail, parts.next(length)) for base, head, tail, length in value["requests"]]
    )
    return [_as_call(call, reader, parts) for call in value["calls"]]


def _as_call(value: dict[str, Any], reader: BodyReader, parts: _Parts) -> ModelCall:
    requests = {name: value.pop(name) for name in ("request", "upstream_request")}
    answers = {name: parts.next(value.pop(name)) for name in _ANSWERS if name in value}
    value["usage"] = Usage.model_construct(**value["usage"])
    return ModelCall.reading_from(RecordedBodies(reader, requests, answers), **value)
