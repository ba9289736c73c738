"""What `gymgate doctor` looks at: everything a run needs of this machine."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from gymgate.config import DEFAULT_NEMO_GYM, SUPPORTED_NEMO_GYM, cache_dir
from gymgate.errors import SetupError
from gymgate.runtime.command import CommandError, run_command
from gymgate.runtime.ensure import runtimes_dir
from gymgate.runtime.environment import installer_env, offline
from gymgate.runtime.installer import find_uv
from gymgate.runtime.interpreters import find_interpreters
from gymgate.runtime.venv import facts_of

_UV_TIMEOUT_S = 20.0
FILES_WANTED = 4096
"""Open files from which a few hundred concurrent rollouts are safe."""
SPACE_WANTED_GB = 3.0
"""Free space that making a runtime with a cold package cache takes."""


class Check(NamedTuple):
    """One thing looked at. `ok` is `None` for what is not there and not required."""

    name: str
    ok: bool | None
    detail: str


def run_checks() -> Iterator[Check]:
    """Each check as it is made; none needs the network. What makes runtimes is not required once there is one."""
    runtimes = list(_runtimes())
    missing = None if any(check.ok for check in runtimes) else False
    own = f"{platform.python_implementation()} {platform.python_version()}"
    yield Check("gymgate", True, f"{metadata.version('gymgate')} on {own}")
    yield _uv(missing)
    yield _interpreters(missing)
    yield from runtimes
    yield _cache()
    yield _free_space(missing)
    yield _open_files()
    yield _loopback()
    yield _package("verifiers", "pip install 'gymgate[nemogym]'")
    yield _package("datasets", "pip install 'gymgate[datasets]'")
    yield _docker()
    if offline():
        yield Check("network", None, "switched off by GYMGATE_OFFLINE or UV_OFFLINE")


def _uv(missing: bool | None) -> Check:
    try:
        path = find_uv()
        told = run_command([path, "--version"], env=installer_env(), timeout_s=_UV_TIMEOUT_S)
    except SetupError as error:
        return Check("uv", missing, str(error))
    except CommandError as error:
        return Check("uv", missing, f"{path} does not run: {error}")
    return Check("uv", True, f"{told.strip()} at {path}")


def _interpreters(missing: bool | None) -> Check:
    found = find_interpreters()
    detail = ", ".join(map(str, found)) or "none found; `uv python install 3.13`, or name one with --python"
    return Check("CPython >= 3.12", True if found else missing, detail)


def _runtimes() -> Iterator[Check]:
    for version in SUPPORTED_NEMO_GYM:
        places = [
            place for place in sorted(runtimes_dir().glob(f"nemo-gym-{version}-py*")) if facts_of(place)
        ]
        if places:
            detail = f"{len(places)} in {runtimes_dir()}: {', '.join(place.name for place in places)}"
            yield Check(f"nemo-gym {version}", True, detail)
        elif version == DEFAULT_NEMO_GYM:
            yield Check(f"nemo-gym {version}", None, f"not made yet; gymgate setup --gym {version}")


def _cache() -> Check:
    path = cache_dir()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Check("cache directory", False, f"cannot write {path}: {error.strerror}; set GYMGATE_CACHE")
    return Check("cache directory", True, str(path))


def _free_space(missing: bool | None) -> Check:
    existing = next(each for each in (cache_dir(), *cache_dir().parents) if each.exists())
    free = shutil.disk_usage(existing).free / 1e9
    enough = free >= SPACE_WANTED_GB
    advice = "" if enough else f"; making a runtime takes {SPACE_WANTED_GB:g} GB: set GYMGATE_CACHE"
    return Check("free space", True if enough else missing, f"{free:.1f} GB{advice}")


def _open_files() -> Check:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    enough = hard == resource.RLIM_INFINITY or hard >= FILES_WANTED
    advice = "" if enough else f"; raise `ulimit -n` to {FILES_WANTED}"
    return Check("open files", enough, f"up to {limit}{advice}")


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


def _docker() -> Check:
    path = shutil.which("docker")
    if path is None:
        return Check("docker", None, "not found; only environments with a sandbox need it")
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    server = Path(host.removeprefix("unix://"))
    if host.startswith("unix://") and not os.access(server, os.R_OK | os.W_OK):
        return Check(
            "docker", None, f"{path}, but {server} cannot be used; only environments with a sandbox need it"
        )
    return Check("docker", True, path)
