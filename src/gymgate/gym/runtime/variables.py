"""The environment variables that gymgate's child processes get: an allow-list, so that no secret reaches them by chance."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from gymgate.gym.runtime.pip_settings import index_settings

_NETWORK_NAMES = """
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
"""
NETWORK = frozenset(_NETWORK_NAMES.split())
"""How hosts are reached, and which certificates are trusted."""
_COMMON_NAMES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM TMPDIR TMP TEMP LD_LIBRARY_PATH
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR
    HF_HOME HF_ENDPOINT HF_HUB_OFFLINE HF_HUB_CACHE HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    CUDA_VISIBLE_DEVICES CUDA_HOME NVIDIA_VISIBLE_DEVICES OPENBLAS_CORETYPE
    NEMO_SKILLS_SANDBOX_HOST NEMO_SKILLS_SANDBOX_PORT
    DOCKER_HOST DOCKER_CONTEXT DOCKER_CONFIG DOCKER_CERT_PATH DOCKER_TLS_VERIFY
"""
_EVERY_PROCESS = NETWORK | frozenset(_COMMON_NAMES.split())
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_BUILD_NAMES = """
    CC CXX AR LD CFLAGS CXXFLAGS CPPFLAGS LDFLAGS CPATH LIBRARY_PATH PKG_CONFIG_PATH MAKEFLAGS MAX_JOBS JAVA_HOME NETRC
    SSH_AUTH_SOCK SSH_AGENT_PID GIT_SSH GIT_SSH_COMMAND GIT_ASKPASS GIT_TERMINAL_PROMPT GIT_SSL_CAINFO GIT_SSL_NO_VERIFY
    DBUS_SESSION_BUS_ADDRESS XDG_CONFIG_DIRS NPM_TOKEN
"""
_BUILDING = frozenset(_BUILD_NAMES.split())
"""How packages are fetched and built, with the credentials that registries ask for."""
_BUILDING_PREFIXES = ("CMAKE_", "CARGO_", "RUST", "NODE_", "NPM_CONFIG_", "npm_config_", "GIT_CONFIG_")
_OWN = frozenset({"XDG_DATA_DIRS", "XDG_STATE_HOME"})
_OWN_PREFIXES = (
    "GYMGATE_",
    "UV_",
    "PIP_",
    "PYTHON",
    "VIRTUAL_ENV",
    "__PYVENV",
    "PYENV_",
    "CONDA_",
    "MALLOC_",
)
"""Variables that gymgate's own processes read, too."""
_LOCALE_NAMES = "LC_ALL LC_COLLATE LC_CTYPE LC_MESSAGES LC_MONETARY LC_NUMERIC LC_TIME"
_SECRET = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD)S?(?:_|$)")
"""A name that tells of a secret, which a prefix alone lets pass to no process."""

_SELECT_NAMES = """
    UV_PYTHON UV_PROJECT UV_PROJECT_ENVIRONMENT UV_SYSTEM_PYTHON UV_WORKING_DIR VIRTUAL_ENV VIRTUAL_ENV_PROMPT
    PYTHONPATH PYTHONHOME __PYVENV_LAUNCHER__ CONDA_PREFIX
"""
_SELECTING = frozenset(_SELECT_NAMES.split())
"""Variables that select an interpreter or a virtual environment."""

_UV_NAMES = """
    UV_INDEX UV_DEFAULT_INDEX UV_INDEX_URL UV_EXTRA_INDEX_URL UV_FIND_LINKS UV_INDEX_STRATEGY UV_KEYRING_PROVIDER
    UV_INSECURE_HOST UV_SYSTEM_CERTS UV_NATIVE_TLS UV_CONFIG_FILE UV_CREDENTIALS_DIR UV_OFFLINE UV_CACHE_DIR
    UV_LINK_MODE UV_HTTP_TIMEOUT UV_HTTP_RETRIES UV_HTTP_CONNECT_TIMEOUT UV_REQUEST_TIMEOUT UV_CONCURRENT_DOWNLOADS
    UV_PYTHON_DOWNLOADS UV_PYTHON_INSTALL_DIR UV_PYTHON_INSTALL_MIRROR UV_PYTHON_CACHE_DIR UV_PYTHON_DOWNLOADS_JSON_URL
    UV_LOCK_TIMEOUT
"""
_UV = frozenset(_UV_NAMES.split())
"""uv's settings for the origin of packages and for the network. Its others (UV_PYTHON, UV_CONSTRAINT, UV_RESOLUTION,
UV_PROJECT_ENVIRONMENT, ...) would change what is installed, or where."""
_UV_PREFIXES = ("UV_INDEX_",)


def clean_env(extra: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of NeMo Gym's processes: the allow-list, and the variables named in `extra` that are set.

    No provider key, no `UV_PYTHON`, `VIRTUAL_ENV` or `PYTHONPATH` gets through. Loopback never goes through a proxy, and
    the SDK's virtual environment is not on `PATH`.
    """
    env = _own_variables(extra)
    if "PATH" in env:
        roots = (os.environ.get("VIRTUAL_ENV"), sys.prefix if sys.prefix != sys.base_prefix else None)
        own = {Path(root) / "bin" for root in roots if root}
        entries = env["PATH"].split(os.pathsep)
        env["PATH"] = os.pathsep.join(entry for entry in entries if entry and Path(entry) not in own)
    return env | _loopback_without_proxy(env)


def daemon_env(extra: Iterable[str] = ()) -> dict[str, str]:
    """Return the environment of gymgate's own processes: `clean_env`'s variables and those that installing needs.

    No endpoint's key, unless named in `extra`: keys are read in the caller's process and reach the daemon over its socket.
    """
    own = {name for name in os.environ if name.startswith(_OWN_PREFIXES) and not _SECRET.search(name)}
    return _own_variables(_BUILDING.union(extra, _OWN, own), (*_BUILDING_PREFIXES, *_UV_PREFIXES))


def installer_env() -> dict[str, str]:
    """Return the environment of uv and npm: how they reach and build packages, and no other key or token.

    Variables that point uv at another interpreter or other versions are left out. Without index settings of uv's own, it
    gets pip's. `GYMGATE_OFFLINE` becomes `UV_OFFLINE`.
    """
    env = _own_variables(_BUILDING | _UV, (*_BUILDING_PREFIXES, *_UV_PREFIXES))
    if offline():
        env["UV_OFFLINE"] = "1"
    return {**index_settings({**os.environ, **env}), **env, **_loopback_without_proxy(env)}


def users_env(programs: Path, others: Path) -> dict[str, str]:
    """Return the environment of NeMo Gym's own command line, which the user runs: all of the user's variables.

    Those that select another interpreter or virtual environment are left out, because NeMo Gym makes virtual environments
    of its own with uv. PATH begins with `programs` and ends with `others`.
    """
    env = {name: value for name, value in os.environ.items() if name not in _SELECTING}
    path = os.pathsep.join([str(programs), clean_env().get("PATH", os.defpath), str(others)])
    return {**index_settings(env), **env, "PATH": path}


def offline() -> bool:
    """Return whether the user switched the network off: `GYMGATE_OFFLINE` or `UV_OFFLINE`."""
    return any(
        os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
        for name in ("GYMGATE_OFFLINE", "UV_OFFLINE")
    )


def _own_variables(names: Iterable[str], prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """This process's variables that every child may have, and those with the given names and prefixes."""
    allowed = _EVERY_PROCESS.union(_LOCALE_NAMES.split(), names)
    return {name: value for name, value in os.environ.items() if name in allowed or name.startswith(prefixes)}


def _loopback_without_proxy(environment: dict[str, str]) -> dict[str, str]:
    def extended(name: str) -> str:
        hosts = [host.strip() for host in environment.get(name, "").split(",")]
        return ",".join(dict.fromkeys([*filter(None, hosts), *_LOOPBACK]))

    return {name: extended(name) for name in ("NO_PROXY", "no_proxy")}
