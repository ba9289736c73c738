"""The command that servers are there for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import Sequence
from urllib.parse import urlsplit

from gymgate.errors import ConfigError
from gymgate.serving.servers import Server
from gymgate.serving.supervisor import die_with_parent

GRACE_S = 60.0
"""To end after TERM, when a server has failed or we are ended."""


class Program:
    """A command, once; it has the servers' addresses in its arguments and its environment."""

    def __init__(self, command: str, urls: str, servers: Sequence[Server] = ()) -> None:
        self._argv = [argument.replace("{urls}", urls) for argument in shlex.split(command)]
        if not self._argv:
            raise ConfigError("--run needs a command")
        self._environment = {**os.environ, "GYMGATE_POLICY_URLS": urls, **_sandbox_variables(servers)}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def send(self, number: signal.Signals) -> None:
        """Pass a signal on. The command has a session of its own, so that a terminal's Ctrl-C comes once."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def run(self) -> int:
        """Its exit code; 128 and the signal's number if one ended it. It is ended with us."""
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, env=self._environment, start_new_session=True, preexec_fn=die_with_parent
            )
        except OSError as error:
            raise ConfigError(f"--run: cannot run {self._argv[0]!r}: {error.strerror}") from error
        try:
            code = await self._process.wait()
        finally:
            await self._end()
        return 128 - code if code < 0 else code

    async def _end(self) -> None:
        process = self._process
        assert process is not None
        if process.returncode is None:
            self.send(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _sandbox_variables(servers: Sequence[Server]) -> dict[str, str]:
    """Where NeMo Gym's servers look for a sandbox, as plain values."""
    for server in servers:
        if not server.is_policy:
            parts = urlsplit(server.url)
            port = parts.port or {"http": 80, "https": 443}[parts.scheme]
            return {"NEMO_SKILLS_SANDBOX_HOST": parts.hostname or "", "NEMO_SKILLS_SANDBOX_PORT": str(port)}
    return {}
