"""Writing a call's answer to the agent, plain or as a stream, and knowing whether all of it was written.

A stream's status line is held back until the answer is there, so that a failure of the endpoint arrives as a
proper HTTP status, which every SDK understands. Clients give up on a silent connection after 5 minutes (Node's
fetch) or more, so after `hold_s` the stream begins, with a comment (Anthropic: a `ping` event) every `ping_s`;
a failure after that is the dialect's error event.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from aiohttp import web
from multidict import CIMultiDict

from gymgate import codec
from gymgate.config import Dialect
from gymgate.gateway.call import Call
from gymgate.gateway.dialects import error_body

JSON_HEADERS = CIMultiDict({"Content-Type": "application/json"})
ERROR_HEADERS = CIMultiDict({"Content-Type": "application/json", "x-should-retry": "false"})
"""gymgate has retried by then: SDKs that know this header do not multiply it."""
STREAM_HEADERS = CIMultiDict(
    {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
)
RELEASED = "the rollout of this call was released; no further calls are answered for it"


class StreamTimes(NamedTuple):
    """Seconds a stream's start is held back, and between signs of life after that."""

    hold_s: float = 60.0
    ping_s: float = 15.0


def error_response(dialect: Dialect, status: int, message: str, kind: str) -> web.Response:
    """An error in the envelope of `dialect`."""
    body = codec.dumps(error_body(dialect, status, message, kind))
    return web.Response(body=body, status=status, headers=ERROR_HEADERS)


async def deliver(
    request: web.BaseRequest, call: Call, times: StreamTimes
) -> tuple[web.StreamResponse, bool]:
    """Wait for the call and write its answer; whether it was fully written to the connection."""
    if not await call.wait(times.hold_s if call.streamed else None):
        return await _deliver_late_stream(request, call, times)
    return await _write(request, _response(call))


def _response(call: Call) -> web.Response:
    if call.status is None:
        return error_response(call.dialect, 404, RELEASED, "not_found_error")
    if call.status != 200:
        return web.Response(body=call.payload, status=call.status, headers=ERROR_HEADERS)
    return web.Response(body=call.payload, headers=STREAM_HEADERS if call.streamed else JSON_HEADERS)


async def _write(request: web.BaseRequest, response: web.StreamResponse) -> tuple[web.StreamResponse, bool]:
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
    response = web.StreamResponse(headers=STREAM_HEADERS)
    ping = b'event: ping\ndata: {"type": "ping"}\n\n' if call.dialect == "messages" else b": waiting\n\n"
    try:
        await response.prepare(request)
        await response.write(ping)
        while not await call.wait(times.ping_s):
            await response.write(ping)
        await response.write(call.payload if call.status == 200 else _error_event(call))
    except ConnectionError:
        return response, False
    return await _write(request, response)


def _error_event(call: Call) -> bytes:
    body: dict[str, Any] = error_body(call.dialect, 404, RELEASED, "not_found_error")
    payload = call.payload if call.status is not None else codec.dumps(body)
    return b"event: error\ndata: " + payload + b"\n\n"
