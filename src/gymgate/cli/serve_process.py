"""The replay policy in a process of its own, for callers that want neither an event loop nor a busy thread."""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Self

import click

from gymgate.config import RuntimeConfig
from gymgate.errors import ConfigError, StackStartError
from gymgate.runtime import daemon_env

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0


class ReplayServer:
    """A running replay server; `close` (or leaving it as a context manager) ends it.

    It ends by itself when this process does, however that dies.
    """

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    @cached_property
    def base_url(self) -> str:
        """Up to `/v1`; waits until the server listens, and raises as `start_replay_server` if it does not."""
        try:
            return _first_line(self._process, self._errors)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Stop the server within seconds. Idempotent."""
        _stop(self._process)
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def start_replay_server(
    environments: str | Sequence[str] = (),
    *,
    files: Sequence[str | Path] = (),
    index: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    runtime: RuntimeConfig | None = None,
) -> ReplayServer:
    """Start a server that answers from the rollouts recorded for environments, or from files of recordings.

    Returns when it listens. Raises `ConfigError` for an environment without recordings or a port that is
    taken, `StackStartError` if it does not come up.
    """
    server = begin_replay_server(
        environments, files=files, index=index, host=host, port=port, runtime=runtime
    )
    assert server.base_url
    return server


def begin_replay_server(
    environments: str | Sequence[str] = (),
    *,
    files: Sequence[str | Path] = (),
    index: int | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    runtime: RuntimeConfig | None = None,
) -> ReplayServer:
    """As `start_replay_server`, but it returns at once; reading `base_url` waits until the server listens."""
    names = [environments] if isinstance(environments, str) else list(environments)
    paths = [*recording_files(names, runtime), *(str(path) for path in files)]
    pinned = [] if index is None else ["--index", str(index)]
    listed = [part for path in paths for part in ("--replay-file", path)]
    flags = ["--host", host, "--port", str(port), "--end-with-stdin", *pinned, *listed]
    return _start([sys.executable, "-m", "gymgate", "serve", "--replay", *flags])


def recording_files(environments: Sequence[str], runtime: RuntimeConfig | None = None) -> list[str]:
    """Paths of the rollouts recorded for environments; `ConfigError` for one that ships none."""
    if not environments:
        return []
    from gymgate.api import load_catalog
    from gymgate.cli.run_plan import replay

    catalog = load_catalog(runtime, progress=lambda message: click.echo(message, err=True))
    return list(replay([catalog.find(name) for name in environments], ()).rollouts)


def _start(argv: list[str]) -> ReplayServer:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
    # A session of its own: the Ctrl-C that ends the caller's work must not end its policy first.
    process = subprocess.Popen(
        argv,
        env=daemon_env(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )
    return ReplayServer(process, errors)


def _first_line(process: subprocess.Popen[bytes], errors: IO[bytes]) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + START_TIMEOUT_S
    ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
    if not ready:
        raise StackStartError(f"the replay server did not come up within {START_TIMEOUT_S:.0f} s")
    if line := process.stdout.readline().decode().strip():
        return line
    process.wait(STOP_TIMEOUT_S)
    errors.seek(0)
    said = errors.read().decode(errors="replace").strip()
    if said.startswith("gymgate: "):
        raise ConfigError(said.removeprefix("gymgate: "))
    raise StackStartError(f"the replay server ended with code {process.returncode}", log_tail=said[-2000:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
