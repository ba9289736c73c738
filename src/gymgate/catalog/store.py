"""Keeps the scan of a release in the cache directory, so that the next process need not read a thousand files."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pydantic

import gymgate
from gymgate.catalog.model import Environment
from gymgate.config import cache_dir
from gymgate.errors import DataError
from gymgate.files import replacing

_FORMAT = pydantic.TypeAdapter(tuple[str, list[Environment]])
"""The stamp of an installation, and its environments."""


def load(site: Path, version: str) -> list[Environment] | None:
    """Return what `save` kept for exactly this installation and this gymgate; `None` if there is none."""
    try:
        stamp, environments = _FORMAT.validate_json(_path(site).read_bytes())
    except (OSError, pydantic.ValidationError):
        return None
    return environments if stamp == _stamp(site, version) else None


def save(site: Path, version: str, environments: Sequence[Environment]) -> None:
    """Keep a scan and replace an older one. A cache that cannot be written is ignored."""
    stamp, path = _stamp(site, version), _path(site)
    if stamp is None:
        return
    with contextlib.suppress(DataError), replacing(path) as file:
        file.write(_FORMAT.dump_json((stamp, list(environments))))


def _path(site: Path) -> Path:
    return cache_dir() / "catalog" / f"{hashlib.sha256(os.fsencode(site.absolute())).hexdigest()[:16]}.json"


def _stamp(site: Path, version: str) -> str | None:
    """Return a text that changes with the installation and with gymgate; `None` for a checkout, whose files may change at any
    time."""
    metadata = site / f"nemo_gym-{version}.dist-info"
    if not metadata.is_dir() or not (site / "resources_servers").is_dir():
        return None
    own = max(path.stat().st_mtime_ns for path in Path(__file__).parent.glob("*.py"))
    return f"{version} {metadata.stat().st_mtime_ns} gymgate {gymgate.__version__} {own}"
