"""One request to the gateway, from its path to the answer written, with signs of life if that is late."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web
from multidict import CIMultiDict

from gymgate.core import codec, http_client
from gymgate.core.config import POLICY, Dialect
from gymgate.gateway.agent_ports import AgentPorts
from gymgate.gateway.backends.http import FORWARDED
from gymgate.gateway.call import Call
from gymgate.gateway.dialects import error_body, error_event
from gymgate.gateway.repeats import RequestKey, is_marked_retry
from gymgate.gateway.requests import (
    DIALECTS,
    METADATA_KEY,
    REFUSED,
    Refusal,
    RequestPath,
    check_encoding,
    key_of_headers,
    looks_like_key,
    parse_body,
    parse_path,
    take_routing_entry,
)
from gymgate.gateway.route import Route
from gymgate.gateway.socket_owners import is_own, user_of

if TYPE_CHECKING:
    from gymgate.gateway.server import Gateway

logger = logging.getLogger(__name__)

JSON_HEADERS = CIMultiDict({"Content-Type": "application/json"})
ERROR_HEADERS = CIMultiDict({"Content-Type": "application/json", "x-should-retry": "false"})
"""The gateway has retried already: SDKs that know this header do not retry again."""
STREAM_HEADERS = CIMultiDict(
    {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
)
_ROUTING_ENTRY = METADATA_KEY.encode()
_ROUTING_KEY = re.compile(rb'"%b"\s*:\s*"(?:[^"\\]*/)?([0-9a-f]{32})\b' % _ROUTING_ENTRY)
_RELEASED = "the rollout of this call was released; no further calls are answered for it"
_HOW_TO_SEND_A_KEY = (
    "the request carries no rollout key: use the base URL /ng-rollout/<key>/v1, or send the key as "
    "'Authorization: Bearer <key>' or 'x-api-key: <key>'"
)
DROPPED_KEY = (
    "for an agent that drops its rollout's key, give its environment routing='process' (--routing process)"
)
_NO_TOKENIZER = (
    "there is no tokenizer behind this endpoint: gymgate passes model calls on and cannot count or list tokens; "
    "ask the engine itself, or configure the agent to go without"
)


class StreamTimes(NamedTuple):
    """When a stream begins, and how often it shows a sign of life.

    A stream's status line is held back until the answer is there, so that a failure of the endpoint arrives as a proper
    HTTP status, which every SDK understands. Clients give up on a silent connection after 5 minutes (Node's fetch) or
    more. So after `hold_s` the stream begins, with a comment (Anthropic: a `ping` event) every `ping_s`, and a failure
    after that is the dialect's error event.
    """

    hold_s: float = 60.0
    ping_s: float = 15.0


@dataclass(frozen=True)
class PortHandler:
    """Answers the requests that arrive at one port of the gateway."""

    gateway: Gateway
    model_server: str
    """The model server of the stack that the port stands for."""
    agent_ports: AgentPorts | None = None
    """The ports of an agent process that this port is one of."""
    key_required: bool = False
    """Refuse a request without a live rollout's key, even from this user's own processes."""

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        path = parse_path(request.raw_path)
        try:
            if path.operation in DIALECTS and request.method == "POST":
                return await self._model_call(request, path)
            return self._other(request, path)
        except Refusal as refusal:
            return _error_response(path.dialect, refusal.status, refusal.message)
        except ConnectionError:
            return web.Response()  # the agent closed the connection in the middle of its request

    async def _model_call(self, request: web.BaseRequest, path: RequestPath) -> web.StreamResponse:
        raw, body, route = await self._read(request, path)
        if (connection := request.protocol) is None or connection.transport is None:
            return web.Response()  # gone already: nothing was started, so there is nothing to join
        call_key = RequestKey(self.model_server, path.operation, raw, request.headers.get("Idempotency-Key"))
        call = route.repeated.find(call_key, retry=is_marked_retry(request.headers))
        if call is None:
            call = await route.start(call_key, DIALECTS[path.operation], body, connection)
        else:
            logger.info("rollout %s: call %d was sent again and joined", route.rollout_id, call.record.index)
            call.connection = connection
        times = self.gateway.stream_times
        if await call.wait(times.hold_s if call.streamed else None):
            response, written = await _write(request, _response(call))
        else:
            response, written = await _deliver_late_stream(request, call, times)
        # A retry may have taken the call over meanwhile; it settles the call then.
        if call.connection is connection or written:
            route.settle(call_key, call, written=written)
        return response

    async def _read(self, request: web.BaseRequest, path: RequestPath) -> tuple[bytes, dict[str, Any], Route]:
        """Return the request without our routing entry, as bytes and parsed, and the rollout that it belongs to.

        A body is read only if its sender may send one, and parsed only if there is somewhere to send it.
        """
        check_encoding(request.headers)
        route = self._admit(request, path)
        raw = await _body(request)
        if route is not None and route.closed:  # its rollout ended while the body arrived
            raise _unknown_key(path)
        if route is None and _ROUTING_ENTRY not in raw:
            route = self._other_route(request, path)
        sender = route
        if route is None and (hidden := _ROUTING_KEY.search(raw)) is not None:
            sender = self.gateway.find(hidden[1].decode())
        past = None if sender is None or sender.closed else sender.conversations(self.model_server)
        parse = codec.parse_bounded if past is None else partial(past.parse, dialect=path.dialect)
        body, raw = parse_body(raw, parse)
        stripped, entry = take_routing_entry(body)
        if stripped is not body:
            raw = codec.dumps(stripped)
        return raw, stripped, route or self._other_route(request, path, entry)

    def _admit(self, request: web.BaseRequest, path: RequestPath) -> Route | None:
        """Return the live rollout whose key the request carries. `Refusal` without one, unless its sender may do without."""
        gateway, key = self.gateway, _key_of(request, path)
        route = gateway.keyless if gateway.is_open else None if key is None else gateway.find(key)
        if route is None or route.closed:
            route = None
            self._refuse_strangers(request, path)
        gateway.newcomers.remove(request.protocol)
        return route

    def _other_route(self, request: web.BaseRequest, path: RequestPath, entry: str | None = None) -> Route:
        """The rollout of a request with its key in the body, or without a key; `Refusal` if there is none."""
        key = entry if entry is not None and looks_like_key(entry) else _key_of(request, path)
        if key is not None:
            route = self.gateway.find(key)
            if route is None or route.closed:
                raise _unknown_key(path)
            return route
        if self.agent_ports is not None:
            return self.agent_ports.holder()
        if self.model_server == POLICY:
            self.gateway.keyless_policy_calls += 1
            raise Refusal(401, f"{_HOW_TO_SEND_A_KEY}; {DROPPED_KEY}")
        if self.gateway.keyless.target(self.model_server) is None:
            raise self.gateway.keyless.refuse(self.model_server)
        return self.gateway.keyless

    def _refuse_strangers(self, request: web.BaseRequest, path: RequestPath) -> None:
        """Without a live rollout's key, serve only this user's own processes.

        Calls of gateways are refused: they go where the endpoint of any rollout says.
        """
        is_forwarded = any(FORWARDED in value for value in request.headers.getall("Via", ()))
        if not self.key_required and not is_forwarded and is_own(user_of(request.transport)):
            return
        if _key_of(request, path) is not None:
            raise _unknown_key(path)
        served = f"only processes of user {os.getuid()} are"
        only = f"(without one, {'nobody is' if self.key_required else served} served)"
        raise Refusal(401, f"{_HOW_TO_SEND_A_KEY} {only}")

    def _other(self, request: web.BaseRequest, path: RequestPath) -> web.StreamResponse:
        operation = path.operation
        if operation == "" and path.key is None:
            return web.Response(text="gymgate gateway\n")  # NeMo Gym's health checks
        if operation in REFUSED:
            raise Refusal(404, _NO_TOKENIZER)
        if operation in DIALECTS:
            raise Refusal(405, f"{request.method} is not allowed here; POST the call")
        name, _, model = operation.partition("/")
        if name == "models" and request.method in ("GET", "HEAD"):
            route = self._admit(request, path) or self._other_route(request, path)
            return self._models(route, one=bool(model))
        choices = ", ".join([*DIALECTS, "models"])
        raise Refusal(404, f"the gateway does not serve /{operation}; it serves {choices}")

    def _models(self, route: Route, *, one: bool) -> web.Response:
        target = route.target(self.model_server)
        name = getattr(target.backend, "model", None) if target is not None else None
        model = {"id": name or self.model_server, "object": "model", "created": 0, "owned_by": "gymgate"}
        body = model if one else {"object": "list", "data": [model]}
        return web.Response(body=codec.dumps(body), headers=JSON_HEADERS)


def _key_of(request: web.BaseRequest, path: RequestPath) -> str | None:
    return path.key if path.key is not None else key_of_headers(request.headers)


def _unknown_key(path: RequestPath) -> Refusal:
    message = f"no rollout has this key: it was never opened, or {_RELEASED}"
    return Refusal(401 if path.key is None else 404, message)


async def _body(request: web.BaseRequest) -> bytes:
    """Read the body with a bound, and with one copy of a long body less than `request.read`."""
    if (request.content_length or 0) > http_client.MAX_BODY:
        raise _too_long()
    if "Expect" in request.headers and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    pieces: list[bytes] = []
    left = http_client.MAX_BODY
    while piece := await request.content.readany():
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise _too_long()
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_long() -> Refusal:
    return Refusal(413, f"the request's body is longer than {http_client.MAX_BODY} bytes")


def _error_response(dialect: Dialect, status: int, message: str) -> web.Response:
    body = codec.dumps(error_body(dialect, status, message))
    return web.Response(body=body, status=status, headers=ERROR_HEADERS)


def _response(call: Call) -> web.Response:
    if call.record.status_code is None:
        return _error_response(call.record.dialect, 404, _RELEASED)
    if call.record.status_code != 200:
        return web.Response(body=call.payload, status=call.record.status_code, headers=ERROR_HEADERS)
    return web.Response(body=call.payload, headers=STREAM_HEADERS if call.streamed else JSON_HEADERS)


async def _write(request: web.BaseRequest, response: web.StreamResponse) -> tuple[web.StreamResponse, bool]:
    """Write an answer; return also whether it was fully written to the connection."""
    if (transport := request.transport) is None or transport.is_closing():
        return response, False
    # With no buffer allowed, write_eof returns when the kernel has taken everything.
    transport.set_write_buffer_limits(high=0)
    try:
        await response.prepare(request)
        await response.write_eof()
    except ConnectionError:
        return response, False
    return response, request.transport is not None and not transport.is_closing()


async def _deliver_late_stream(
    request: web.BaseRequest, call: Call, times: StreamTimes
) -> tuple[web.StreamResponse, bool]:
    """Write signs of life until the call ends, then its answer; see `_write`."""
    response = web.StreamResponse(headers=STREAM_HEADERS)
    ping = (
        b'event: ping\ndata: {"type": "ping"}\n\n' if call.record.dialect == "messages" else b": waiting\n\n"
    )
    try:
        await response.prepare(request)
        await response.write(ping)
        while not await call.wait(times.ping_s):
            await response.write(ping)
        payload, dialect = call.payload, call.record.dialect
        if call.record.status_code != 200:
            is_released = call.record.status_code is None
            error = error_body(dialect, 404, _RELEASED) if is_released else codec.loads_own(payload)
            payload = error_event(error, dialect)
        await response.write(payload)
    except ConnectionError:
        return response, False
    return await _write(request, response)
