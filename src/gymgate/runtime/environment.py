"""What the processes we start get to see of the caller's environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterable

_ALLOWED = {
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LANGUAGE",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "XDG_CACHE_HOME",
    "XDG_DATA_HOME",
    "XDG_RUNTIME_DIR",
    "HF_HOME",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
}
_PREFIXES = ("LC_",)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_INTERPRETER = (
    "UV_PYTHON",
    "UV_PROJECT_ENVIRONMENT",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONSTARTUP",
    "PYTHONSAFEPATH",
    "__PYVENV_LAUNCHER__",
)


def clean_env(extra: Iterable[str] = ()) -> dict[str, str]:
    """The allow-listed environment of NeMo Gym's processes, and the variables named in `extra` that are set.

    No provider key, no `UV_PYTHON`, `VIRTUAL_ENV` or `PYTHONPATH` gets through; loopback never goes through a proxy.
    """
    wanted = _ALLOWED | set(extra)
    kept = {name: value for name, value in os.environ.items() if name in wanted or name.startswith(_PREFIXES)}
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in kept.get(name, "").split(",") if host.strip()]
        kept[name] = ",".join(dict.fromkeys([*hosts, *_LOOPBACK]))
    return kept


def installer_env() -> dict[str, str]:
    """The environment for uv: the caller's, less what would point it at another interpreter, with pip's index settings."""
    environment = {name: value for name, value in os.environ.items() if name not in _INTERPRETER}
    for ours, pips in (
        ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"),
        ("UV_INDEX", "PIP_EXTRA_INDEX_URL"),
        ("UV_FIND_LINKS", "PIP_FIND_LINKS"),
    ):
        if pips in environment:
            environment.setdefault(ours, environment[pips])
    return environment
