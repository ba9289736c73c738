"""Small HTTP servers that speak JSON, as policies, agents and resources servers do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from parts import codec

Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
"""Takes the path and body of a request, and returns status and body of its answer."""


async def serve(host: str, port: int, answer: Answer) -> None:
    """Answer requests until this is cancelled. As with NeMo Gym's servers, a caller that goes away cancels its request."""

    async def handle(request: web.BaseRequest) -> web.Response:
        status, body = await answer(request.path, codec.loads_own(await request.read() or b"{}"))
        return web.json_response(body, status=status, dumps=lambda value: codec.dumps(value).decode())

    server = web.Server(handle, access_log=None, handler_cancellation=True)
    listening = await asyncio.get_running_loop().create_server(server, host, port)
    try:
        async with listening:
            await listening.serve_forever()
    finally:
        await server.shutdown(1)
