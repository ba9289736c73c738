"""The scripted HTTP server of the tests: it answers as a script says. And raw connections that can be dropped at any moment."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from gymgate.core.config import HTTPEndpoint


@dataclass
class Seen:
    """A request that reached the upstream."""

    path: str
    headers: dict[str, str]
    raw: bytes
    request: web.BaseRequest

    @property
    def body(self) -> dict[str, Any]:
        return dict(json.loads(self.raw))


Script = Callable[[Seen], Awaitable[web.StreamResponse]]
MODELS = {"object": "list", "data": [{"id": "m", "object": "model"}]}


def chat_answer(text: str | None = "hello", **fields: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    } | fields


def responses_answer(text: str = "hello", **fields: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "scripted",
        "status": "completed",
        "output": [
            {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
        ],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 2,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 5,
        },
        **fields,
    }


async def drop(seen: Seen) -> web.StreamResponse:
    """Break the connection without a word."""
    assert seen.request.transport is not None
    seen.request.transport.abort()
    return web.Response()


async def drop_midway(seen: Seen) -> web.StreamResponse:
    """Break the connection in the middle of the answer."""
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(seen.request)
    await response.write(b'{"choices":')
    return await drop(seen)


async def say_hello(seen: Seen) -> web.Response:
    return web.json_response(chat_answer() if seen.path.endswith("completions") else responses_answer())


@dataclass
class Upstream:
    """Answers by `script`; every request that arrived is in `seen`."""

    script: Script = say_hello
    seen: list[Seen] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: int = 0
    url: str = ""
    listener: asyncio.Server | None = None

    def endpoint(self, **fields: Any) -> HTTPEndpoint:
        return HTTPEndpoint(base_url=self.url, **{"max_retries": 0, **fields})

    async def arrivals(self, count: int) -> None:
        while len(self.seen) < count:
            self.arrived.clear()
            await self.arrived.wait()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        seen = Seen(request.path, dict(request.headers), await request.content.read(), request)
        self.seen.append(seen)
        self.arrived.set()
        try:
            return await self.script(seen)
        except asyncio.CancelledError:
            self.cancelled += 1
            self.arrived.set()
            raise


@asynccontextmanager
async def upstream(script: Script = say_hello, port: int = 0) -> AsyncIterator[Upstream]:
    """A running `Upstream`; a caller that goes away cancels the script, so that tests see it."""
    serving = Upstream(script)
    server = web.Server(serving.handle, handler_cancellation=True)
    serving.listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", port)
    serving.url = f"http://127.0.0.1:{serving.listener.sockets[0].getsockname()[1]}/v1"
    try:
        yield serving
    finally:
        serving.listener.close()
        server.pre_shutdown()
        await server.shutdown(0.2)


@contextmanager
def upstream_in_thread(script: Script = say_hello) -> Iterator[Upstream]:
    """The same for a test without an event loop, on a thread of its own."""
    started: Future[Upstream] = Future()

    async def serve() -> None:
        async with upstream(script) as serving:
            stop = asyncio.Event()
            ending.append((asyncio.get_running_loop(), stop))
            started.set_result(serving)
            await stop.wait()

    ending: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    try:
        yield started.result(10)
    finally:
        for loop, stop in ending:
            loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def answering(answers: Mapping[str, Any], status: int = 200) -> Script:
    """JSON, or a text as it is, by path; 404 for other paths."""

    async def script(seen: Seen) -> web.Response:
        if seen.path not in answers:
            return web.Response(status=404)
        value = answers[seen.path]
        if isinstance(value, str):
            return web.Response(text=value, status=status)
        return web.json_response(value, status=status)

    return script


@contextmanager
def scripted_chat(answer: Callable[[str], str]) -> Iterator[str]:
    """The base URL of a chat-completions endpoint; `answer` gets the text of the last message."""

    async def script(seen: Seen) -> web.Response:
        if seen.path.endswith("/models"):
            return web.json_response(MODELS)
        content = seen.body["messages"][-1]["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        return web.json_response(chat_answer(answer(text), model=seen.body.get("model", "m")))

    with upstream_in_thread(script) as serving:
        yield serving.url


class RawConnection:
    """An HTTP/1.1 connection that sends what it is told and can be cut off anywhere."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> RawConnection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def post(self, path: str, body: bytes, **headers: str) -> None:
        lines = [f"POST {path} HTTP/1.1", "Host: gateway", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer, which has a Content-Length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = next(
            int(line.split(":")[1])
            for line in head.split("\r\n")
            if line.lower().startswith("content-length")
        )
        return int(head.split()[1]), await self.reader.readexactly(length)

    async def drop(self) -> None:
        self.writer.transport.abort()
        await asyncio.sleep(0)
