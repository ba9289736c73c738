"""Two of one release's servers, one as it is and one with lean middlewares, and raw requests to both."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gymgate.core.http_client import LOOPBACK
from gymgate.gym.runtime import clean_env, ensure_runtime
from gymgate.stack.daemon import children
from gymgate.stack.daemon.children import Child
from gymgate.stack.daemon.forkserver_client import ForkServerClient
from gymgate.stack.ports import HeldPort
from support.stacks import runtime

HERE = Path(__file__).parent
NAME = "server"
_SIGNED = re.compile(r"Server___server=([A-Za-z0-9+/=_.-]+)")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_FRAMES = re.compile(r"^(\s|\+|Traceback|During handling|The above exception)")
ANSWER_S = 20.0


class Served:
    """A server under test."""

    def __init__(self, child: Child, port: int, noted: Path) -> None:
        self.child = child
        self.port = port
        self.noted = noted

    async def open(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(LOOPBACK, self.port, limit=1 << 22)
        writer.write(request)
        return reader, writer

    async def ask(self, request: bytes) -> bytes:
        """Return all that the server sends until it closes the connection."""
        reader, writer = await self.open(request)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await reader.read()
        finally:
            writer.close()

    async def events(self) -> list[str]:
        answer = await self.ask(http("GET", "/events"))
        events: list[str] = json.loads(answer.partition(b"\r\n\r\n")[2])
        return events

    async def until(self, *expected: str) -> None:
        """Return when the server's events end with those expected."""
        async with asyncio.timeout(ANSWER_S):
            while (await self.events())[-len(expected) :] != [*expected]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def log(self) -> list[str]:
        """Return the lines of the log without frames of tracebacks and what differs between any two servers."""
        text = _without_port(self.child.log.read_text().replace(f"({NAME}) ", ""), self.port)
        text = re.sub(r"(?m)^.*(gymgate: |Uvicorn running|server process|Finished server).*\n", "", text)
        text = re.sub(r"(?m)^Formatted exception: .*", "Formatted exception:", text)
        text = re.sub(r"position \d+", "position N", text)  # in a traceback
        text = re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", text)
        return [line for line in text.splitlines() if line and not _FRAMES.match(line)]

    def messages(self) -> list[str]:
        """Return the messages of the log, sorted, without tracebacks and what depends on how long a shutdown takes."""
        lines = (line.removesuffix("Traceback (most recent call last):") for line in self.log())
        return sorted(
            line for line in lines if re.match("INFO|ERROR: |WARNING|🚨", line) and "Waiting for" not in line
        )


def http(method: str, path: str, body: Any = None, *headers: str) -> bytes:
    """Return a request as bytes; `body` is JSON unless it is bytes."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", *headers]
    if body is not None and not any(line.startswith("transfer-encoding") for line in headers):
        lines.append(f"content-length: {len(content)}")
    if body is not None and not isinstance(body, bytes):
        lines.append("content-type: application/json")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def comparable(answer: bytes, port: int) -> bytes:
    """Return an answer without its date, the ids and signatures in its cookies, and the server's own port."""
    text = _without_port(answer.decode("latin-1"), port)
    text = re.sub(r"(?m)^date: .*$", "date: now", text)
    return _UUID.sub("UUID", _SIGNED.sub(lambda match: f"session={session_in(match[1])}", text)).encode(
        "latin-1"
    )


def _without_port(text: str, port: int) -> str:
    """Not within a longer number: an answer may hold any."""
    return re.sub(rf"(?<!\d){port}(?!\d)", "PORT", text)


def session_in(cookie: str) -> str:
    """Return the content of a session's cookie, with each id as one word."""
    data = cookie.split(".")[0]
    return _UUID.sub("UUID", cookie if cookie == "null" else base64.b64decode(data).decode())


async def logs_of(servers: tuple[Served, Served], last: str | None = None) -> list[list[str]]:
    """Return the two logs as soon as they are the same, or as they are after 20 s: a line may come after an answer.

    `last` names the line that both must end with, where there is one.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            while True:
                stock, lean = (served.log() for served in servers)
                if lean == stock and last in (None, *stock[-1:]):
                    break
                await asyncio.sleep(0.01)
    return [served.log() for served in servers]


@contextlib.asynccontextmanager
async def both(
    version: str,
    directory: Path,
    entrypoint: str = "app.py",
    kind: str = "resources_servers",
    **settings: Any,
) -> AsyncIterator[tuple[Served, Served]]:
    """Serve a program twice: as the release has it, and lean."""
    python = (await asyncio.to_thread(ensure_runtime, runtime(version))).python
    environment = {**clean_env(()), "PYTHONUNBUFFERED": "1"}
    fork_server = await ForkServerClient.start(python, environment, directory)
    ports = [HeldPort(), HeldPort()]
    try:
        servers = []
        for name, port in zip(("stock", "lean"), ports, strict=True):
            noted = directory / f"{name}.json"
            block = {
                "host": LOOPBACK,
                "port": port.number,
                "entrypoint": entrypoint,
                "domain": "other",
                **settings,
            }
            config = {
                NAME: {kind: {NAME: block}},
                "head_server": {"host": LOOPBACK, "port": 1},
                "dry_run": False,
                "observability_enabled": True,
                "global_aiohttp_connector_limit_per_host": 0,
            }
            child = await fork_server.serve(
                name,
                directory / f"{name}.log",
                directory=str(HERE),
                entrypoint=entrypoint,
                instance=NAME,
                config=config,
                ray=False,
                **({"lean": str(noted)} if name == "lean" else {}),
            )
            servers.append(Served(child, port.number, noted))
        for served in servers:
            async with asyncio.timeout(60):
                await children.until_listening(served.child, served.port, "test")
        yield servers[0], servers[1]
    finally:
        await fork_server.close()
        for port in ports:
            port.close()


async def shut_down(served: Served) -> int | None:
    """Stop a server as gymgate does, and return its exit status."""
    served.child.kill(signal.SIGINT)
    async with asyncio.timeout(ANSWER_S):
        return await asyncio.shield(served.child.exited)
