"""Recorded rollouts, served as a policy without keys: on this event loop, until cancelled, or in a thread."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import ConfigError
from gymgate.core.http_client import url_host
from gymgate.gateway.replay.backend import ReplayBackend
from gymgate.gateway.server import Gateway
from gymgate.gym.by_name import replay_of
from gymgate.gym.runtime import open_catalog
from gymgate.gym.runtime.command import Progress
from gymgate.stack.sync import LoopThread


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


async def serve(paths: Sequence[str], on_ready: Callable[[str], None], **where: Any) -> None:
    """Serve until cancelled; `on_ready` gets the base URL."""
    async with serve_replay(paths, **where) as base_url:
        on_ready(base_url)
        await asyncio.Event().wait()


def recording_files(
    environments: Sequence[str], runtime: RuntimeConfig | None, progress: Progress = lambda _: None
) -> list[str]:
    """Return the paths of the rollouts recorded for environments. Raises `ConfigError` for one that has none."""
    if not environments:
        return []
    catalog = open_catalog(runtime, progress=progress)
    return list(replay_of([catalog.find(name) for name in environments]).rollouts)


class ReplayServer:
    """Recorded rollouts as a policy, served in a thread of this process for callers without an event loop; a context manager.

    Answers from the rollouts recorded for environments and from files of recordings. Raises `ConfigError` for an
    environment without recordings. Entering it waits until it listens, and raises `DataError` for a recording that cannot
    be read.
    """

    base_url: str
    """The address up to `/v1`."""
    _loop: LoopThread

    def __init__(
        self,
        environments: Sequence[str] = (),
        *,
        files: Sequence[str | Path] = (),
        runtime: RuntimeConfig | None = None,
    ) -> None:
        self._serving = serve_replay([*recording_files(environments, runtime), *map(str, files)])

    def __enter__(self) -> Self:
        self._loop = LoopThread()
        try:
            self.base_url = self._loop.call(self._serving.__aenter__())
        except BaseException:
            self._loop.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        # In order, before the loop stops: cancelled with it, a connection that was just accepted would stay open.
        self._loop.call(self._serving.__aexit__(None, None, None))
        self._loop.stop()
