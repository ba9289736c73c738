"""Small HTTP servers that speak JSON, as policies, agents and resources servers do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from parts import codec

Answer = Callable[[str, dict[str, Any]], Awaitable[tuple[int, dict[str, Any]]]]
"""Takes the path and body of a request, and returns status and body of its answer."""


class Connection(asyncio.Protocol):
    """Answers one request after the other. As with NeMo Gym's servers, a caller that goes away cancels its request."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._buffer = b""
        self._answering: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        for task in self._answering:
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        length = int(
            (head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0") if end else 0
        )
        if end and len(rest) >= length:
            self._buffer = rest[length:]
            task = asyncio.create_task(self._handle(head.split(b" ", 2)[1].decode(), rest[:length]))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _handle(self, path: str, body: bytes) -> None:
        status, value = await self._answer(path, codec.loads_own(body or b"{}"))
        content = codec.dumps(value)
        head = f"HTTP/1.1 {status} Because\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self._transport.write(head.encode() + content)


async def serve(host: str, port: int, answer: Answer) -> None:
    """Answer requests until this is cancelled."""
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: Connection(answer), host, port) as listening:
        await listening.serve_forever()
