"""`gymgate serve`: recorded rollouts as a policy that any OpenAI-compatible client can call; also in a child process."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import click

from gymgate.cli.options import gym_option, host_option, replay_file_option, replay_option
from gymgate.cli.output import log
from gymgate.config import RuntimeConfig
from gymgate.errors import ConfigError, StackStartError
from gymgate.runtime import daemon_env

PARENT_CHECK_S = 1.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0


@click.command("serve")
@click.argument("environments", nargs=-1, metavar="[ENV]...")
@replay_option
@replay_file_option
@click.option(
    "--index", type=click.IntRange(0), metavar="N", help="Answer only from recording N, counted from 0."
)
@host_option
@click.option(
    "--port",
    default=0,
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Port to listen on; 0: a free one.",
    show_default=True,
)
@gym_option
@click.option("--end-with-stdin", is_flag=True, hidden=True, help="End when stdin does.")
def command(
    environments: tuple[str, ...],
    replay: bool,
    files: tuple[str, ...],
    index: int | None,
    host: str,
    port: int,
    gym: RuntimeConfig,
    end_with_stdin: bool,
) -> None:
    """Serve recorded rollouts as a policy.

    It answers chat-completions, Responses and Anthropic messages calls, plain and streamed, with the rollouts recorded for
    ENV. Prints its base URL when it is ready, and runs until it is interrupted. Any API key is accepted.
    """
    if not replay and not files:
        raise ConfigError(
            "gymgate serve serves recorded rollouts: add --replay; to run rollouts, use gymgate run"
        )
    if not environments and not files:
        raise ConfigError("name an environment whose recorded rollouts to serve, or give --replay-file FILE")
    paths = [*_recording_files(environments, gym), *files]
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(paths, index, host, port, end_with_stdin))


async def _serve(paths: Sequence[str], index: int | None, host: str, port: int, end_with_stdin: bool) -> None:
    from gymgate.gateway.serve import serve_replay

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with serve_replay(paths, index=index, host=host, port=port) as base_url:
        click.echo(base_url)
        sys.stdout.flush()
        if not end_with_stdin:
            await stopped.wait()
            return
        loop.add_reader(sys.stdin.fileno(), _read_stdin, loop, stopped)
        parent = os.getppid()
        while not stopped.is_set() and os.getppid() == parent:  # a fork of the parent may hold stdin open
            try:
                await asyncio.wait_for(stopped.wait(), PARENT_CHECK_S)
            except TimeoutError:
                continue


def _read_stdin(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stopped.set()


def _recording_files(environments: Sequence[str], runtime: RuntimeConfig | None) -> list[str]:
    """Paths of the rollouts recorded for environments. Raises `ConfigError` for one that has none."""
    if not environments:
        return []
    from gymgate.api import load_catalog
    from gymgate.cli.policies import replay_endpoint

    catalog = load_catalog(runtime, progress=log)
    return list(replay_endpoint([catalog.find(name) for name in environments], ()).rollouts)


class ReplayServer:
    """`gymgate serve --replay` in a child process, for callers without an event loop.

    Made, it starts at once and answers from the rollouts recorded for environments and from files of recordings. `close`
    (or leaving it as a context manager) ends it; it also ends when this process does, however that dies. Raises
    `ConfigError` for an environment without recordings.
    """

    def __init__(
        self,
        environments: Sequence[str] = (),
        *,
        files: Sequence[str | Path] = (),
        port: int = 0,
        runtime: RuntimeConfig | None = None,
    ) -> None:
        paths = [*_recording_files(environments, runtime), *map(str, files)]
        command = [
            sys.executable,
            "-m",
            "gymgate",
            "serve",
            "--replay",
            "--port",
            str(port),
            "--end-with-stdin",
        ]
        for path in paths:
            command += ["--replay-file", path]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        # In a session of its own: the Ctrl-C that ends the caller's work must not end its policy first.
        self._process = subprocess.Popen(
            command,
            env=daemon_env(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )

    @cached_property
    def base_url(self) -> str:
        """The address up to `/v1`; waits until the server listens.

        Raises `ConfigError` for a port that is taken or a recording that cannot be read, `StackStartError` if the server
        does not start.
        """
        try:
            return self._first_line()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Stop the server within seconds. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _first_line(self) -> str:
        process = self._process
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        if not ready:
            raise StackStartError(f"the replay server did not start within {START_TIMEOUT_S:.0f} s")
        if line := process.stdout.readline().decode().strip():
            return line
        process.wait(STOP_TIMEOUT_S)
        self._errors.seek(0)
        output = self._errors.read().decode(errors="replace").strip()
        if output.startswith("gymgate: "):
            raise ConfigError(output.removeprefix("gymgate: "))
        raise StackStartError(
            f"the replay server ended with code {process.returncode}", log_tail=output[-2000:]
        )
