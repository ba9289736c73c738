"""An OpenAI-compatible server without keys in front of one backend: what `gymgate serve --replay` runs.

It speaks what the gateway speaks (Responses, chat, messages, plain and streamed, `/v1/models`) and looks at no key.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path as FilePath

from aiohttp import web

from gymgate.errors import ConfigError
from gymgate.gateway.backends.base import Backend
from gymgate.gateway.backends.replay import ReplayBackend
from gymgate.gateway.delivery import StreamTimes
from gymgate.gateway.handler import Handler
from gymgate.gateway.requests import Path
from gymgate.gateway.route import KeylessRoute, Route, Target
from gymgate.gateway.server import KEEPALIVE_S, STOP_TIMEOUT_S

_NAME = "replay"


class _KeylessHandler(Handler):
    """Takes every request for its one route's, whatever key it carries."""

    def _keyed_route(self, request: web.BaseRequest, path: Path) -> Route:
        return self._gateway.keyless


class _OneRoute:
    """The routes of a gateway that has only its keyless one."""

    def __init__(self, backend: Backend) -> None:
        self.keyless = KeylessRoute({_NAME: Target(backend, memory=None)})
        self.stream_times = StreamTimes()

    def find(self, key: str) -> Route | None:
        """There is no other."""
        return None


@asynccontextmanager
async def serve_backend(backend: Backend, *, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve a backend to anyone who can reach the port; the value is the base URL, up to `/v1`.

    `port` 0 takes a free one; `ConfigError` if the port given is taken or the host is not this machine's.
    """
    one = _OneRoute(backend)
    server = web.Server(
        _KeylessHandler(one, _NAME),
        access_log=None,
        auto_decompress=False,
        keepalive_timeout=KEEPALIVE_S,
    )
    listener = await _listen(server, host, port)
    try:
        bound = listener.sockets[0].getsockname()[1]
        yield f"http://[{host}]:{bound}/v1" if ":" in host else f"http://{host}:{bound}/v1"
    finally:
        listener.close()
        await asyncio.shield(_stop(server, one.keyless))


async def _listen(server: web.Server, host: str, port: int) -> asyncio.Server:
    try:
        return await asyncio.get_running_loop().create_server(server, host, port, backlog=4096)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"port {port} is taken on {host}; choose another, or 0 for a free one"
        else:
            what = f"cannot listen on {host} port {port}: {error.strerror}"
        raise ConfigError(what) from error


async def _stop(server: web.Server, route: KeylessRoute) -> None:
    server.pre_shutdown()
    await route.close()
    await server.shutdown(STOP_TIMEOUT_S)


@asynccontextmanager
async def serve_replay(
    paths: Iterable[str | FilePath], *, index: int | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """Serve recorded rollouts from this event loop; the value is the base URL, up to `/v1`.

    Raises `DataError` for files that are not recordings, and what `serve_backend` raises.
    """
    backend = ReplayBackend.load(paths, index)
    await asyncio.to_thread(backend.preload)
    async with serve_backend(backend, host=host, port=port) as base_url:
        yield base_url
