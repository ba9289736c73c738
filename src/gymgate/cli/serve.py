"""`gymgate serve`: recorded rollouts as a policy that any OpenAI-compatible client can call; also in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import click

from gymgate.cli.interrupts import serve_interruptibly
from gymgate.cli.options import gym_option, host_option, number_option, port_option, replay_file_option
from gymgate.cli.output import log
from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import ConfigError
from gymgate.runs.policies import replay_files
from gymgate.stack.sync import LoopThread


@click.command("serve")
@click.argument("environments", nargs=-1, metavar="[ENV]...")
@replay_file_option
@number_option("--index", help="Answer only from recording N, counted from 0.", least=0)
@host_option
@port_option(0)
@gym_option
def command(
    environments: tuple[str, ...],
    files: tuple[str, ...],
    index: int | None,
    host: str,
    port: int,
    gym: RuntimeConfig,
) -> None:
    """Serve recorded rollouts as a policy.

    It answers chat-completions, Responses and Anthropic messages calls, plain and streamed, with the rollouts recorded for
    ENV. Prints its base URL when it is ready, and runs until it is interrupted. Any API key is accepted.
    """
    if not environments and not files:
        raise ConfigError("give an environment to serve its recorded rollouts, or --replay-file FILE")
    replayed = replay_files(files)  # refused, if wrong, before NeMo Gym is installed
    paths = [*_recording_files(environments, gym), *replayed]
    serve_interruptibly(_serve(paths, click.echo, index=index, host=host, port=port))


async def _serve(
    paths: Sequence[str], on_ready: Callable[[str], None], until: asyncio.Event | None = None, **where: Any
) -> None:
    """Serve until the event, or until this is cancelled; `on_ready` gets the base URL."""
    from gymgate.gateway.replay.server import serve_replay

    async with serve_replay(paths, **where) as base_url:
        on_ready(base_url)
        await (until or asyncio.Event()).wait()


def _recording_files(environments: Sequence[str], runtime: RuntimeConfig | None) -> list[str]:
    """Paths of the rollouts recorded for environments. Raises `ConfigError` for one that has none."""
    if not environments:
        return []
    from gymgate.gym.by_name import replay_of
    from gymgate.gym.runtime import open_catalog

    catalog = open_catalog(runtime, progress=log)
    return list(replay_of([catalog.find(name) for name in environments]).rollouts)


class ReplayServer:
    """`gymgate serve` in a thread of this process, for callers without an event loop; a context manager.

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
        self._paths = [*_recording_files(environments, runtime), *map(str, files)]
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
            await _serve(self._paths, self._address.set_result, self._end, port=self._port)
        except Exception as error:
            self._address.set_exception(error)
