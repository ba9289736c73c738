"""Check everything that a run needs of this machine."""

from __future__ import annotations

import platform
import resource
import shlex
import shutil
import socket
import tempfile
from collections.abc import Iterator
from importlib import metadata

from gymgate.core.config import DEFAULT_NEMO_GYM, SUPPORTED_NEMO_GYM, cache_dir
from gymgate.core.errors import SetupError
from gymgate.doctor import Finding
from gymgate.doctor.packages import check_sdks
from gymgate.gateway.serving_process import max_rollouts
from gymgate.gym.runtime.command import CommandError, run_command
from gymgate.gym.runtime.containers import describe_unjudged, leftovers
from gymgate.gym.runtime.ensure import runtimes_dir
from gymgate.gym.runtime.interpreters import find_interpreters
from gymgate.gym.runtime.owners import UNREACHABLE_PROCESS
from gymgate.gym.runtime.sandbox_providers import PROVIDERS, check_provider
from gymgate.gym.runtime.uv import find_uv
from gymgate.gym.runtime.variables import installer_env, offline
from gymgate.gym.runtime.venv import read_runtime
from gymgate.stack.paths import unjudged_directories

_UV_TIMEOUT_S = 20.0
FILES_WANTED = 4096
"""Open files that a few hundred concurrent rollouts need."""
SPACE_WANTED_GB = 3.0
"""Free space that making a runtime with a cold package cache takes."""


def check_machine() -> Iterator[Finding]:
    """Yield each finding when it is made; no check needs the network. A runtime makes uv and interpreters optional."""
    runtimes = list(_runtimes())
    missing = None if any(finding.ok for finding in runtimes) else False
    python = f"{platform.python_implementation()} {platform.python_version()}"
    yield Finding("gymgate", True, f"{metadata.version('gymgate')} on {python}")
    yield _uv(missing)
    yield _interpreters(missing)
    yield from runtimes
    yield _cache()
    yield _free_space(missing)
    yield _open_files()
    yield _loopback()
    yield from check_sdks()
    for name in PROVIDERS:  # none is required: only environments with a sandbox need one
        check = check_provider(name)
        yield Finding(f"sandbox {name}", check.usable or None, check.detail)
    yield from _leftovers()
    if offline():
        yield Finding("network", None, "switched off by GYMGATE_OFFLINE or UV_OFFLINE")


def _uv(missing: bool | None) -> Finding:
    try:
        path = find_uv()
        version = run_command([path, "--version"], env=installer_env(), timeout_s=_UV_TIMEOUT_S)
    except SetupError as error:
        return Finding("uv", missing, str(error))
    except CommandError as error:
        return Finding("uv", missing, f"{path} does not run: {error}")
    return Finding("uv", True, f"{version.strip()} at {path}")


def _interpreters(missing: bool | None) -> Finding:
    try:
        interpreters = ", ".join(map(str, find_interpreters()))
    except SetupError as error:
        return Finding("CPython >= 3.12", missing, str(error))
    advice = "none found; `uv python install 3.13`, or give one with --python"
    return Finding("CPython >= 3.12", True if interpreters else missing, interpreters or advice)


def _runtimes() -> Iterator[Finding]:
    for version in SUPPORTED_NEMO_GYM:
        paths = [path for path in runtimes_dir().glob(f"nemo-gym-{version}-py*") if read_runtime(path)]
        if paths:
            runtimes = "1 runtime" if len(paths) == 1 else f"{len(paths)} runtimes"
            yield Finding(f"nemo-gym {version}", True, f"{runtimes} in {runtimes_dir()}")
        elif version == DEFAULT_NEMO_GYM:
            yield Finding(f"nemo-gym {version}", None, f"not installed yet; gymgate setup --gym {version}")


def _cache() -> Finding:
    path = cache_dir()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Finding("cache directory", False, f"cannot write {path}: {error.strerror}; set GYMGATE_CACHE")
    return Finding("cache directory", True, str(path))


def _free_space(missing: bool | None) -> Finding:
    existing = next(path for path in (cache_dir(), *cache_dir().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    enough = free >= SPACE_WANTED_GB
    advice = "" if enough else f"; making a runtime takes {SPACE_WANTED_GB:g} GB: set GYMGATE_CACHE"
    return Finding("free space", True if enough else missing, f"{free:.1f} GB{advice}")


def _open_files() -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = (
        "unlimited"
        if hard == resource.RLIM_INFINITY
        else f"{hard}, for {max_rollouts()} rollouts at once or more"
    )
    enough = hard == resource.RLIM_INFINITY or hard >= FILES_WANTED
    advice = "" if enough else f"; raise `ulimit -n` to {FILES_WANTED}"
    return Finding("open files", enough, f"up to {limit}{advice}")


def _loopback() -> Finding:
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            return Finding("loopback", True, "127.0.0.1 answers")
    except OSError as error:
        return Finding("loopback", False, f"127.0.0.1 does not answer: {error}")


def _leftovers() -> Iterator[Finding]:
    """Yield the containers of stacks that are gone, and what stacks have that cannot be judged from here."""
    containers = leftovers()
    if names := [container.name for container in containers if container.is_certain]:
        detail = (
            f"{len(names)} of stacks that are gone; `gymgate cache clean` removes them: {', '.join(names)}"
        )
        yield Finding("containers", None, detail)
    if unjudged := describe_unjudged(containers):
        yield Finding("containers", None, unjudged)
    try:
        paths = unjudged_directories()
    except SetupError as error:
        yield Finding("stack directories", False, str(error))
        return
    if paths:
        listed = shlex.join(map(str, paths))
        yield Finding(
            "stack directories",
            None,
            f"{len(paths)} {UNREACHABLE_PROCESS}; if those are gone: rm -r {listed}",
        )
