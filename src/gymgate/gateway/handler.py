"""One request to the gateway, from its path to the answer written."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from aiohttp import web

from gymgate import codec
from gymgate.gateway.delivery import RELEASED, StreamTimes, deliver, error_response
from gymgate.gateway.requests import (
    DIALECTS,
    REFUSED,
    Path,
    Refusal,
    key_of_headers,
    looks_like_key,
    parse_path,
    take_routing_entry,
    without_attempt,
)
from gymgate.gateway.resends import RequestKey, is_marked_retry
from gymgate.gateway.route import POLICY, KeylessRoute, Route
from gymgate.gateway.slot import Slot

logger = logging.getLogger(__name__)

_HOW_TO_SEND_A_KEY = (
    "the request carries no rollout key: use the base URL /ng-rollout/<key>/v1, or send the key as "
    "'Authorization: Bearer <key>' or 'x-api-key: <key>'"
)
_NO_ENDPOINT_OF_ITS_OWN = (
    "this call to model server {0!r} carries no rollout key, so only an endpoint of its own can answer it, and it has "
    'none: give the stack one with models={{"{0}": ...}} or --model {0}=URL'
)
_NO_TOKENIZER = (
    "there is no tokenizer behind this endpoint: gymgate passes model calls on and cannot count or list tokens; "
    "ask the engine itself, or configure the agent to go without"
)


class Routes(Protocol):
    """Where a handler finds the rollouts."""

    def find(self, key: str) -> Route | None: ...

    @property
    def keyless(self) -> KeylessRoute: ...

    @property
    def stream_times(self) -> StreamTimes: ...


class Handler:
    """Answers the requests made to one model server of a stack; with `slot`, on a port of that slot's."""

    def __init__(self, gateway: Routes, model_server: str, slot: Slot | None = None) -> None:
        self._gateway = gateway
        self._model_server = model_server
        self._slot = slot

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        path = parse_path(request.raw_path)
        try:
            if path.operation in DIALECTS and request.method == "POST":
                return await self._model_call(request, path)
            return self._other(request, path)
        except Refusal as refusal:
            return error_response(path.dialect, refusal.status, refusal.message, refusal.kind)
        except ConnectionError:
            return web.Response()  # the agent is gone, in the middle of its request

    async def _model_call(self, request: web.BaseRequest, path: Path) -> web.StreamResponse:
        raw, body, route = await self._read(request, path)
        if (connection := request.protocol) is None or connection.transport is None:
            return web.Response()  # gone already: nothing was started, so there is nothing to join
        call_key = RequestKey(self._model_server, path.operation, raw, request.headers.get("Idempotency-Key"))
        call = route.find_resent(call_key, retry=is_marked_retry(request.headers))
        if call is None:
            call = await route.start(call_key, DIALECTS[path.operation], body, connection)
        else:
            logger.info("rollout %s: call %d was sent again and joined", route.rollout_id, call.index)
            call.connection = connection
        response, written = await deliver(request, call, self._gateway.stream_times)
        if call.connection is connection or written:
            route.settle(call_key, call, written=written)
        return response

    async def _read(self, request: web.BaseRequest, path: Path) -> tuple[bytes, dict[str, Any], Route]:
        """The request without our routing entry, as sent and as parsed, and the rollout that it belongs to."""
        if "Expect" in request.headers and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        raw = await _body(request)
        try:
            body, raw = codec.parse(raw)
        except ValueError as error:
            raise Refusal(400, f"the request's body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise Refusal(400, f"the request's body is a JSON {type(body).__name__}, not an object")
        stripped, entry = take_routing_entry(body)
        if stripped is not body:
            raw = codec.dumps(stripped)
        return raw, stripped, self._route(request, path, entry)

    def _route(self, request: web.BaseRequest, path: Path, entry: str | None = None) -> Route:
        key, status = path.key, 404
        if key is None:
            key, status = key_of_headers(request.headers), 401
        if entry is not None and looks_like_key(entry) and (key is None or self._gateway.find(key) is None):
            key = entry
        if key is None:
            return self._keyless_route() if self._slot is None else self._slot.holder()
        route = self._gateway.find(without_attempt(key))
        if route is None or route.closed:
            kind = "not_found_error" if status == 404 else "authentication_error"
            raise Refusal(status, f"no rollout has this key: it was never opened, or {RELEASED}", kind)
        return route

    def _keyless_route(self) -> Route:
        keyless, name = self._gateway.keyless, self._model_server
        if name == POLICY:
            raise Refusal(401, _HOW_TO_SEND_A_KEY, "authentication_error")
        if keyless.target(name) is None:
            raise Refusal(404, _NO_ENDPOINT_OF_ITS_OWN.format(name), "not_found_error")
        return keyless

    def _other(self, request: web.BaseRequest, path: Path) -> web.StreamResponse:
        operation = path.operation
        if operation == "" and path.key is None:
            return web.Response(text="gymgate gateway\n")  # NeMo Gym's health checks
        if operation in REFUSED:
            raise Refusal(404, _NO_TOKENIZER, "not_found_error")
        if operation in DIALECTS:
            raise Refusal(405, f"{request.method} is not allowed here; POST the call")
        name, _, model = operation.partition("/")
        if name == "models" and request.method in ("GET", "HEAD"):
            return self._models(self._route(request, path), one=bool(model))
        choices = ", ".join([*DIALECTS, "models"])
        raise Refusal(404, f"the gateway does not serve /{operation}; it serves {choices}", "not_found_error")

    def _models(self, route: Route, *, one: bool) -> web.Response:
        target = route.target(self._model_server)
        name = getattr(target.backend, "model", None) if target is not None else None
        model = {"id": name or self._model_server, "object": "model", "created": 0, "owned_by": "gymgate"}
        body = model if one else {"object": "list", "data": [model]}
        return web.Response(body=codec.dumps(body), content_type="application/json")


async def _body(request: web.BaseRequest) -> bytes:
    """As `request.read` gives it, with one copy of a long body less."""
    pieces: list[bytes] = []
    left = request.client_max_size
    while piece := await request.content.readany():
        pieces.append(piece)
        left -= len(piece)
        if left < 0:
            raise Refusal(413, f"the request's body is longer than {request.client_max_size} bytes")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
