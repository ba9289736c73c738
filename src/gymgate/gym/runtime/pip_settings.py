"""Translate pip's settings of where packages come from for uv, which does not read them."""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_OWN_INDEX = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_CONFIG_FILE")


def index_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return uv's variables for pip's variables and files; empty if uv has index settings of its own.

    pip treats several indexes as equal, and a lock's hashes make that safe, so uv is set to do the same. By default uv
    stops at the first index that has a package, which may only have an old release.
    """
    if any(environment.get(name) for name in _OWN_INDEX) or _uv_has_index(environment):
        return {}
    pip = _pip_settings(environment)
    settings = {
        "UV_DEFAULT_INDEX": pip.get("index-url", ""),
        "UV_INDEX": " ".join(pip.get("extra-index-url", "").split()),
        "UV_FIND_LINKS": ",".join(pip.get("find-links", "").split()),
        "UV_INSECURE_HOST": " ".join(pip.get("trusted-host", "").split()),
        "SSL_CERT_FILE": pip.get("cert", ""),
    }
    if settings["UV_INDEX"]:
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return {name: value for name, value in settings.items() if value}


def _pip_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Read pip's settings as pip does: later files override earlier ones, `PIP_...` variables override all."""
    settings: dict[str, str] = {}
    for path in _pip_files(environment):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        for section in ("global", "install"):
            if parser.has_section(section):
                settings |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    prefix = "PIP_"
    return settings | {
        name.removeprefix(prefix).lower().replace("_", "-"): value
        for name, value in environment.items()
        if name.startswith(prefix)
    }


def _pip_files(environment: Mapping[str, str]) -> Iterator[Path]:
    own = environment.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        return
    for directory in environment.get("XDG_CONFIG_DIRS", "/etc/xdg").split(os.pathsep):
        yield Path(directory) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    home = Path(environment.get("HOME") or Path.home())
    yield home / ".pip" / "pip.conf"
    yield _config_home(environment) / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if own:
        yield Path(own)


def _uv_has_index(environment: Mapping[str, str]) -> bool:
    for directory in (_config_home(environment), Path("/etc")):
        try:
            if "index" in (directory / "uv" / "uv.toml").read_text(encoding="utf-8"):
                return True
        except (OSError, UnicodeDecodeError):
            continue
    return False


def _config_home(environment: Mapping[str, str]) -> Path:
    home = environment.get("HOME") or str(Path.home())
    return Path(environment.get("XDG_CONFIG_HOME") or Path(home) / ".config")
