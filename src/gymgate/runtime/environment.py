"""What the processes we start get to see of the caller's environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from gymgate.runtime.pip_settings import index_settings

_ALLOWED_NAMES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TERM TMPDIR TMP TEMP LD_LIBRARY_PATH
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_RUNTIME_DIR
    HF_HOME HF_ENDPOINT HF_HUB_OFFLINE HF_HUB_CACHE HF_DATASETS_CACHE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    CUDA_VISIBLE_DEVICES CUDA_HOME NVIDIA_VISIBLE_DEVICES OPENBLAS_CORETYPE
    NEMO_SKILLS_SANDBOX_HOST NEMO_SKILLS_SANDBOX_PORT
"""
_ALLOWED = frozenset(_ALLOWED_NAMES.split())
_ALLOWED_PREFIXES = ("LC_",)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_BUILD_NAMES = """
    CC CXX AR LD CFLAGS CXXFLAGS CPPFLAGS LDFLAGS CPATH LIBRARY_PATH PKG_CONFIG_PATH MAKEFLAGS MAX_JOBS JAVA_HOME NETRC
    SSH_AUTH_SOCK SSH_AGENT_PID GIT_SSH GIT_SSH_COMMAND GIT_ASKPASS GIT_TERMINAL_PROMPT GIT_SSL_CAINFO GIT_SSL_NO_VERIFY
    DBUS_SESSION_BUS_ADDRESS XDG_CONFIG_DIRS NPM_TOKEN
"""
_BUILDING = frozenset(_BUILD_NAMES.split())
_BUILDING_PREFIXES = ("CMAKE_", "CARGO_", "RUST", "NODE_", "NPM_CONFIG_", "npm_config_", "GIT_CONFIG_")
"""How packages are fetched and built, what registries ask for included."""
_OWN_PREFIXES = (
    "GYMGATE_",
    "UV_",
    "PIP_",
    "PYTHON",
    "VIRTUAL_ENV",
    "__PYVENV",
    "PYENV_",
    "CONDA_",
    "XDG_",
    "MALLOC_",
)
"""What gymgate's own processes read beside that."""

_UV_NAMES = """
    UV_INDEX UV_DEFAULT_INDEX UV_INDEX_URL UV_EXTRA_INDEX_URL UV_FIND_LINKS UV_INDEX_STRATEGY UV_KEYRING_PROVIDER
    UV_INSECURE_HOST UV_SYSTEM_CERTS UV_NATIVE_TLS UV_CONFIG_FILE UV_CREDENTIALS_DIR UV_OFFLINE UV_CACHE_DIR
    UV_LINK_MODE UV_HTTP_TIMEOUT UV_HTTP_RETRIES UV_HTTP_CONNECT_TIMEOUT UV_REQUEST_TIMEOUT UV_CONCURRENT_DOWNLOADS
    UV_PYTHON_DOWNLOADS UV_PYTHON_INSTALL_DIR UV_PYTHON_INSTALL_MIRROR UV_PYTHON_CACHE_DIR UV_PYTHON_DOWNLOADS_JSON_URL
    UV_LOCK_TIMEOUT
"""
_UV_KEPT = frozenset(_UV_NAMES.split())
"""uv's settings of where packages come from and how the network is reached. The others (UV_PYTHON, UV_CONSTRAINT,
UV_RESOLUTION, UV_PROJECT_ENVIRONMENT, ...) would change what is installed, or where."""
_UV_KEPT_PREFIXES = ("UV_INDEX_",)


def _seen(names: Iterable[str], prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """What every process may see of this one's variables, and what else is named. Nothing else gets through."""
    wanted, begins = _ALLOWED.union(names), (*_ALLOWED_PREFIXES, *prefixes)
    return {name: value for name, value in os.environ.items() if name in wanted or name.startswith(begins)}


def clean_env(extra: Iterable[str] = ()) -> dict[str, str]:
    """The allow-listed environment of NeMo Gym's processes, and the variables named in `extra` that are set.

    No provider key, no `UV_PYTHON`, `VIRTUAL_ENV` or `PYTHONPATH` gets through; loopback never goes through a
    proxy, and the SDK's virtual environment is not on `PATH`.
    """
    kept = _seen(extra)
    if "PATH" in kept:
        kept["PATH"] = _without_own_environment(kept["PATH"])
    return kept | _loopback_direct(kept)


def daemon_env(extra: Iterable[str] = ()) -> dict[str, str]:
    """The environment of gymgate's own processes, a stack's daemon first: what its servers get, and what installing takes.

    No key of an endpoint's, unless named: those are read in the caller's process and reach the daemon over its socket.
    """
    return _seen(_BUILDING.union(extra), (*_OWN_PREFIXES, *_BUILDING_PREFIXES))


def installer_env() -> dict[str, str]:
    """The environment of uv and npm: how they reach packages and build them, and no other key or token.

    What would point uv at another interpreter or other versions is left out. Where it has no index settings of its
    own, it gets pip's. `GYMGATE_OFFLINE` becomes `UV_OFFLINE`.
    """
    kept = _seen(_BUILDING | _UV_KEPT, (*_BUILDING_PREFIXES, *_UV_KEPT_PREFIXES))
    if offline():
        kept["UV_OFFLINE"] = "1"
    return {**index_settings({**os.environ, **kept}), **kept, **_loopback_direct(kept)}


def offline() -> bool:
    """Whether the user wants no network: `GYMGATE_OFFLINE` or `UV_OFFLINE`."""
    return any(
        os.environ.get(name, "").lower() in ("1", "true", "yes", "on")
        for name in ("GYMGATE_OFFLINE", "UV_OFFLINE")
    )


def _loopback_direct(environment: dict[str, str]) -> dict[str, str]:
    def direct(name: str) -> str:
        hosts = [host.strip() for host in environment.get(name, "").split(",")]
        return ",".join(dict.fromkeys([*filter(None, hosts), *_LOOPBACK]))

    return {name: direct(name) for name in ("NO_PROXY", "no_proxy")}


def _without_own_environment(path: str) -> str:
    own = {Path(root) / "bin" for root in (os.environ.get("VIRTUAL_ENV"), _virtual_environment()) if root}
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if entry and Path(entry) not in own)


def _virtual_environment() -> str | None:
    return sys.prefix if sys.prefix != sys.base_prefix else None
