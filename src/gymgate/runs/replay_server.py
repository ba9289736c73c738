"""Recorded rollouts, served as a policy: until cancelled, or in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from gymgate.core.config import RuntimeConfig
from gymgate.gateway.replay.server import serve_replay
from gymgate.gym.by_name import replay_of
from gymgate.gym.runtime import open_catalog
from gymgate.gym.runtime.command import Progress
from gymgate.stack.sync import LoopThread


async def serve(
    paths: Sequence[str], on_ready: Callable[[str], None], until: asyncio.Event | None = None, **where: Any
) -> None:
    """Serve until the event, or until this is cancelled; `on_ready` gets the base URL."""
    async with serve_replay(paths, **where) as base_url:
        on_ready(base_url)
        await (until or asyncio.Event()).wait()


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
    environment without recordings.
    """

    def __init__(
        self,
        environments: Sequence[str] = (),
        *,
        files: Sequence[str | Path] = (),
        port: int = 0,
        runtime: RuntimeConfig | None = None,
    ) -> None:
        self._paths = [*recording_files(environments, runtime), *map(str, files)]
        self._port = port
        self._loop = LoopThread()
        self._address: Future[str] = Future()
        self._end = asyncio.Event()

    @property
    def base_url(self) -> str:
        """The address up to `/v1`; waits until the server listens.

        Raises `ConfigError` for a port that is taken, and `DataError` for a recording that cannot be read.
        """
        return self._address.result()

    def __enter__(self) -> Self:
        self._loop.enter()
        self._running = self._loop.submit(self._serve())  # asyncio itself keeps no task alive
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call(self._close())
        self._loop.leave()

    async def _close(self) -> None:
        """End in order: cancelled with everything else, the loop would leave a connection that it just accepted open."""
        self._end.set()
        await asyncio.wrap_future(self._running)

    async def _serve(self) -> None:
        try:
            await serve(self._paths, self._address.set_result, self._end, port=self._port)
        except Exception as error:
            self._address.set_exception(error)
