"""An OpenAI-compatible server without keys in front of recorded rollouts, which `gymgate serve` runs."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from gymgate.core.errors import ConfigError
from gymgate.core.http_client import url_host
from gymgate.gateway.replay.backend import ReplayBackend
from gymgate.gateway.server import Gateway


@asynccontextmanager
async def serve_replay(
    paths: Iterable[str | Path], *, index: int | None = None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """Serve recorded rollouts, from this event loop, to anyone who can reach the port; yield the base URL, up to `/v1`.

    It speaks what the gateway speaks (Responses, chat, messages, plain and streamed, `/v1/models`). `port` 0 takes a free
    one. Raises `DataError` for files that are not recordings, and `ConfigError` if the given port is taken or the host is
    not this machine's.
    """
    backend = ReplayBackend(paths, index)
    await asyncio.to_thread(backend.preload)
    async with AsyncExitStack() as exits:
        try:
            gateway = await exits.enter_async_context(Gateway(host=host, port=port, open_to_all=backend))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = f"port {port} is taken on {host}; choose another, or 0 for a free one"
            else:
                reason = f"cannot listen on {host} port {port}: {error.strerror}"
            raise ConfigError(reason) from error
        yield f"http://{url_host(host)}:{gateway.port}/v1"
