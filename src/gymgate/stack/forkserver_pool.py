"""A stack's fork servers, one per interpreter, and the environment variables and programs that they see."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from pathlib import Path
from typing import Any

from gymgate.config import StackConfig
from gymgate.errors import GymgateError
from gymgate.runtime import clean_env
from gymgate.runtime.command import Progress
from gymgate.runtime.installer import find_uv
from gymgate.runtime.interpreters import numbered_commands
from gymgate.stack.forkserver_client import ForkServerClient

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
        self._clients: dict[Path, asyncio.Task[ForkServerClient]] = {}
        self._ray = {**_RAY, "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    async def client(self, python: Path) -> ForkServerClient:
        """Return the fork server of an interpreter, shared by all who ask; another one if it died."""
        task = self._clients.get(python)
        if task is None or (task.done() and (not succeeded(task) or task.result().dead.is_set())):
            self._progress("importing NeMo Gym")
            starting = ForkServerClient.start(python, self._environment(python), self._directory)
            task = self._clients[python] = asyncio.create_task(starting)
        return await asyncio.shield(task)

    def running(self) -> list[ForkServerClient]:
        """Return those that run."""
        started = [task.result() for task in self._clients.values() if succeeded(task)]
        return [client for client in started if not client.dead.is_set()]

    async def close(self) -> None:
        """End all of them."""
        await asyncio.gather(*(_close(task) for task in self._clients.values()))

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


async def _close(task: asyncio.Task[ForkServerClient]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, GymgateError):
        await (await task).close()


def succeeded(task: asyncio.Task[Any]) -> bool:
    """Whether a task has ended with a result."""
    return task.done() and not task.cancelled() and task.exception() is None
