"""`gymgate serve`: recorded rollouts as a policy that any OpenAI-compatible client can call."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import click

from gymgate.cli.serve_process import ReplayServer, recording_files, start_replay_server
from gymgate.config import DEFAULT_NEMO_GYM, RuntimeConfig
from gymgate.errors import ConfigError

__all__ = ["ReplayServer", "command", "start_replay_server"]

PARENT_CHECK_S = 1.0


@click.command("serve")
@click.argument("environments", nargs=-1, metavar="[ENV]...")
@click.option("--replay", is_flag=True, help="Answer from recorded rollouts: no model, no key.")
@click.option(
    "--replay-file",
    "files",
    multiple=True,
    metavar="FILE",
    help="JSONL of recorded rollouts; repeat for several. [those that come with ENV]",
)
@click.option("--index", type=click.IntRange(0), help="Answer from this recording only (0-based).")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option(
    "--port", default=0, type=click.IntRange(0, 65535), help="0 takes a free one.", show_default=True
)
@click.option("--gym", default=DEFAULT_NEMO_GYM, help="nemo-gym release.", show_default=True)
@click.option("--end-with-stdin", is_flag=True, hidden=True, help="End when stdin does.")
def command(
    environments: tuple[str, ...],
    replay: bool,
    files: tuple[str, ...],
    index: int | None,
    host: str,
    port: int,
    gym: str,
    end_with_stdin: bool,
) -> None:
    """Serve the rollouts recorded for ENV as a policy (chat, Responses and messages, plain and streamed).

    Prints its base URL when it is ready and runs until it is interrupted. Any API key is accepted.
    """
    if not replay and not files:
        raise ConfigError(
            "gymgate serve has one thing to serve so far: add --replay; to run rollouts, use gymgate run"
        )
    if not environments and not files:
        raise ConfigError("name an environment whose recorded rollouts to serve, or give --replay-file FILE")
    paths = [*recording_files(environments, RuntimeConfig(version=gym)), *files]
    _run(_serve(paths, index, host, port, end_with_stdin))


async def _serve(paths: Sequence[str], index: int | None, host: str, port: int, end_with_stdin: bool) -> None:
    from gymgate.gateway.keyless import serve_replay

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with serve_replay(paths, index=index, host=host, port=port) as base_url:
        click.echo(base_url)
        sys.stdout.flush()
        if end_with_stdin:
            loop.add_reader(sys.stdin.fileno(), _read_stdin, loop, stopped)
        await (_orphaned(stopped) if end_with_stdin else stopped.wait())


def _read_stdin(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stopped.set()


async def _orphaned(stopped: asyncio.Event) -> None:
    """Wait for the signal to stop, or for the parent's death: a fork of it may hold our stdin open."""
    parent = os.getppid()
    while not stopped.is_set() and os.getppid() == parent:
        try:
            await asyncio.wait_for(stopped.wait(), PARENT_CHECK_S)
        except TimeoutError:
            continue


def _run(main: Coroutine[Any, Any, None]) -> None:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)
