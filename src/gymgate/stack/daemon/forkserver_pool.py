"""A stack's fork servers, one per interpreter, and the environment variables and programs that they see."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from pathlib import Path

from gymgate.core.config import StackConfig
from gymgate.core.errors import GymgateError
from gymgate.core.starting import SharedStart
from gymgate.gym.runtime import clean_env
from gymgate.gym.runtime.command import Progress
from gymgate.gym.runtime.interpreters import numbered_commands
from gymgate.gym.runtime.uv import find_uv
from gymgate.stack.daemon.forkserver_client import ForkServerClient

_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's way to say: on loopback only
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
"""A process that reaches Ray can run code in it, so Ray listens on loopback only and asks for a token."""


class ForkServerPool:
    """Starts fork servers when they are needed, replaces dead ones, closes them with the stack. Belongs to one event loop."""

    def __init__(self, config: StackConfig, directory: Path, progress: Progress) -> None:
        self._config = config
        self._directory = directory
        self._progress = progress
        self._clients: dict[Path, SharedStart[ForkServerClient]] = {}
        self._ray = {**_RAY, "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    async def client(self, python: Path) -> ForkServerClient:
        """Return the fork server of an interpreter, shared by all who ask; another one if it died."""
        if python not in self._clients:
            self._clients[python] = SharedStart(
                lambda: self._start(python), usable=lambda client: not client.dead.is_set()
            )
        return await self._clients[python].get()

    def running(self) -> list[ForkServerClient]:
        """Return those that run."""
        return [client for start in self._clients.values() if (client := start.value) is not None]

    async def close(self) -> None:
        """End all of them."""
        clients = await asyncio.gather(*(start.stop() for start in self._clients.values()))
        await asyncio.gather(
            *(client.close() for client in clients if client is not None), return_exceptions=True
        )

    async def _start(self, python: Path) -> ForkServerClient:
        self._progress("importing NeMo Gym")
        # In a thread: it searches directories, and a slow file system would stall every rollout.
        environment = await asyncio.to_thread(self._environment, python)
        return await ForkServerClient.start(python, environment, self._directory)

    def _environment(self, python: Path) -> dict[str, str]:
        """Return the variables of a fork server: as in an activated environment, for programs that servers call (uv, pytest)."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # a cleaner may have removed it
        environment = {**self._ray, **clean_env(self._config.env_vars), "PYTHONUNBUFFERED": "1"}
        path = environment.get("PATH", os.defpath)
        directories = [str(python.parent), path, str(self._own_programs())]
        environment["PATH"] = os.pathsep.join(directories)
        environment.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
        if roots := self._config.component_roots:
            # Absolute, because the fork server has another working directory.
            absolute = [str(Path(root).expanduser().absolute()) for root in roots]
            environment["NEMO_GYM_EXTRA_ROOTS"] = os.pathsep.join(absolute)
        return environment

    def _own_programs(self) -> Path:
        """Return a directory with gymgate's uv and this machine's interpreters, for servers that make environments.

        uv finds interpreters on PATH only.
        """
        directory = self._directory / "bin"
        directory.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError, GymgateError):
            (directory / "uv").symlink_to(find_uv())
        for name, path in numbered_commands().items():
            with contextlib.suppress(FileExistsError):
                (directory / name).symlink_to(path)
        return directory
