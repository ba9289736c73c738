"""Recorded rollouts, served as a policy: until cancelled, or in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from gymgate.core.config import RuntimeConfig
from gymgate.gateway.replay.server import serve_replay
from gymgate.gym.by_name import replay_of
from gymgate.gym.runtime import open_catalog
from gymgate.gym.runtime.command import Progress
from gymgate.stack.sync import LoopThread


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
    environment without recordings. Entering it waits until it listens, and raises `ConfigError` for a port that is taken
    and `DataError` for a recording that cannot be read.
    """

    base_url: str
    """The address up to `/v1`."""

    def __init__(
        self,
        environments: Sequence[str] = (),
        *,
        files: Sequence[str | Path] = (),
        port: int = 0,
        runtime: RuntimeConfig | None = None,
    ) -> None:
        self._serving = serve_replay([*recording_files(environments, runtime), *map(str, files)], port=port)
        self._loop = LoopThread()

    def __enter__(self) -> Self:
        self._loop.enter()
        try:
            self.base_url = self._loop.call(self._serving.__aenter__())
        except BaseException:
            self._loop.leave()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        # In order, before the loop stops: cancelled with it, a connection that was just accepted would stay open.
        self._loop.call(self._serving.__aexit__(None, None, None))
        self._loop.leave()
