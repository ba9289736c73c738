"""What `gymgate doctor` looks at: everything a run needs of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from gymgate.config import SUPPORTED_NEMO_GYM, RuntimeConfig, cache_dir
from gymgate.errors import SetupError
from gymgate.runtime.ensure import find_runtime
from gymgate.runtime.installer import find_uv
from gymgate.runtime.interpreters import find_interpreters

FILES_WANTED = 4096
"""Open files from which a few hundred concurrent rollouts are safe."""
SPACE_WANTED_GB = 3.0
"""Free space that making a runtime with a cold package cache takes."""


class Check(NamedTuple):
    """One thing looked at. `ok` is `None` for what is optional and not there."""

    name: str
    ok: bool | None
    detail: str


def run_checks() -> Iterator[Check]:
    """Each check in turn, as it is made."""
    yield _uv()
    yield _interpreters()
    yield from _runtimes()
    yield _cache()
    yield _open_files()
    yield _loopback()
    yield _package("verifiers", "pip install 'gymgate[nemogym]'")
    yield _program("docker", "only environments with a sandbox need it")


def _uv() -> Check:
    try:
        return Check("uv", True, find_uv())
    except SetupError as error:
        return Check("uv", False, str(error))


def _interpreters() -> Check:
    found = find_interpreters()
    if not found:
        return Check(
            "CPython >= 3.12", False, "none found; `uv python install 3.13`, or name one with --python"
        )
    return Check("CPython >= 3.12", True, ", ".join(map(str, found)))


def _runtimes() -> Iterator[Check]:
    for version in SUPPORTED_NEMO_GYM:
        runtime = find_runtime(RuntimeConfig(version=version))
        detail = str(runtime.python) if runtime else f"not made yet; gymgate setup --gym {version}"
        yield Check(f"nemo-gym {version}", True if runtime else None, detail)


def _cache() -> Check:
    path = cache_dir()
    existing = next(each for each in (path, *path.parents) if each.exists())
    if not os.access(existing, os.W_OK):
        return Check("cache directory", False, f"{path} is not writable; set GYMGATE_CACHE")
    free = shutil.disk_usage(existing).free / 1e9
    return Check("cache directory", free >= SPACE_WANTED_GB, f"{path}, {free:.0f} GB free")


def _open_files() -> Check:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    enough = hard == resource.RLIM_INFINITY or hard >= FILES_WANTED
    return Check(
        "open files", enough, f"up to {limit}" + ("" if enough else f"; raise `ulimit -n` to {FILES_WANTED}")
    )


def _loopback() -> Check:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            return Check("loopback", True, "127.0.0.1 answers")
    except OSError as error:
        return Check("loopback", False, f"127.0.0.1 does not answer: {error}")


def _package(name: str, command: str) -> Check:
    try:
        return Check(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, None, f"not installed; {command}")


def _program(name: str, why: str) -> Check:
    path = shutil.which(name)
    return Check(name, True if path else None, path or f"not found; {why}")
