"""A stack's fork servers, one for each interpreter: what they see of this machine, and the Ray that their servers share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gymgate.config import StackConfig
from gymgate.errors import GymgateError, StackStartError
from gymgate.runtime import clean_env
from gymgate.runtime.installer import find_uv
from gymgate.runtime.interpreters import numbered_commands
from gymgate.stack.forkserver_client import ForkServerClient
from gymgate.stack.places import ray_directory

RAY_POLL_S = 0.1
_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's way to say: on loopback only
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
"""Whoever reaches a Ray can have it run code: it listens on loopback, and there it asks for a token."""

Progress = Callable[[str], None]


class ForkServerPool:
    """Started when they are asked for, replaced when they died, closed with the stack. Belongs to one event loop."""

    def __init__(self, config: StackConfig, directory: Path, progress: Progress) -> None:
        self._config = config
        self._directory = directory
        self._progress = progress
        self._spawners: dict[Path, asyncio.Task[ForkServerClient]] = {}
        self._rays: dict[ForkServerClient, asyncio.Task[str]] = {}
        self._ray_directories: list[Path] = []
        self._ray = {**_RAY, "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    async def spawner(self, python: Path) -> ForkServerClient:
        """The fork server of an interpreter: one for all who ask, another if it died."""
        task = self._spawners.get(python)
        if task is None or (task.done() and (not _succeeded(task) or task.result().dead.is_set())):
            self._progress("importing NeMo Gym")
            task = self._spawners[python] = asyncio.create_task(self._start_spawner(python))
        return await asyncio.shield(task)

    async def _start_spawner(self, python: Path) -> ForkServerClient:
        environment = {**self._ray, **clean_env(self._config.env_vars), "PYTHONUNBUFFERED": "1"}
        # As in an activated environment: programs that requirements bring, or that servers call (uv, pytest).
        commands, path = str(self.agents_commands()), environment.get("PATH", os.defpath)
        places = [str(python.parent), commands, path, str(self._own_programs())]
        environment["PATH"] = os.pathsep.join(places)
        environment.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
        if self._config.component_roots:
            environment["NEMO_GYM_EXTRA_ROOTS"] = os.pathsep.join(self._component_roots())
        return await ForkServerClient.start(python, environment, self._directory)

    def _component_roots(self) -> list[str]:
        """As absolute paths: the fork server has another working directory."""
        return [str(Path(root).expanduser().absolute()) for root in self._config.component_roots]

    def agents_commands(self) -> Path:
        """A directory for the commands that agents run, in the versions of their configs: before all others."""
        directory = self._directory / "commands"
        directory.mkdir(exist_ok=True)
        return directory

    def _own_programs(self) -> Path:
        """A directory with the uv that gymgate has and the interpreters of this machine, which uv finds on PATH
        only: for servers that make environments of their own."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have tidied up
        directory = self._directory / "bin"
        directory.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError, GymgateError):
            (directory / "uv").symlink_to(find_uv())
        for name, path in numbered_commands().items():
            with contextlib.suppress(FileExistsError):
                (directory / name).symlink_to(path)
        return directory

    async def ray_address(self, spawner: ForkServerClient) -> str:
        """Of the Ray that a fork server's children share, started by the first who asks, and again if it died."""
        task = self._rays.get(spawner)
        if task is None or (task.done() and not _succeeded(task)):
            self._progress("starting Ray")
            task = self._rays[spawner] = asyncio.create_task(self._start_ray(spawner))
        return await asyncio.shield(task)

    async def _start_ray(self, spawner: ForkServerClient) -> str:
        directory = ray_directory()
        self._ray_directories.append(directory)
        child, address = await spawner.start_ray(self._directory / "ray.log", directory / "r")
        while child.alive:
            if address.exists():
                child.exited.add_done_callback(lambda _: self._ray_died(spawner))
                return address.read_text()
            await asyncio.sleep(RAY_POLL_S)
        tail = child.log_tail()
        raise StackStartError(f"Ray did not start: {tail.splitlines()[-1:]}", server="ray", log_tail=tail)

    def _ray_died(self, spawner: ForkServerClient) -> None:
        self._rays.pop(spawner, None)
        spawner.kill_users_of_ray()

    def running(self) -> list[ForkServerClient]:
        """Those that run."""
        started = [task.result() for task in self._spawners.values() if _succeeded(task)]
        return [spawner for spawner in started if not spawner.dead.is_set()]

    async def close(self) -> None:
        """End them all."""
        await asyncio.gather(*(_closed(task) for task in self._spawners.values()))

    def remove_files(self) -> None:
        """What Ray leaves, once none of its processes runs."""
        for directory in self._ray_directories:
            shutil.rmtree(directory, ignore_errors=True)


async def _closed(task: asyncio.Task[ForkServerClient]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, GymgateError):
        await (await task).close()


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
