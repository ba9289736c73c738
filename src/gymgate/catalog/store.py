"""The scan of a release, kept in the cache directory so that the next process need not read a thousand files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pydantic

import gymgate
from gymgate.catalog.model import Environment
from gymgate.config import cache_dir
from gymgate.errors import DataError
from gymgate.files import replacing


@dataclass(frozen=True)
class _Stored:
    stamp: str
    environments: list[Environment]


_FORMAT = pydantic.TypeAdapter(_Stored)


def load(site: Path, version: str) -> list[Environment] | None:
    """What `save` kept for exactly this installation and this gymgate; `None` if there is nothing usable."""
    stamp = _stamp(site, version)
    if stamp is None:
        return None
    try:
        stored = _FORMAT.validate_json(_path(site).read_bytes())
    except (OSError, pydantic.ValidationError):
        return None
    return stored.environments if stored.stamp == stamp else None


def save(site: Path, version: str, environments: Sequence[Environment]) -> None:
    """Keep a scan in place of an older one; a cache that cannot be written is no error."""
    stamp, path = _stamp(site, version), _path(site)
    if stamp is None:
        return
    try:
        with replacing(path) as file:
            file.write(_FORMAT.dump_json(_Stored(stamp, list(environments))))
    except DataError:
        return


def _path(site: Path) -> Path:
    return cache_dir() / "catalog" / f"{hashlib.sha256(os.fsencode(site.absolute())).hexdigest()[:16]}.json"


def _stamp(site: Path, version: str) -> str | None:
    """Changes with the installation and with gymgate. `None` where no installed distribution stands behind the
    files (a checkout): they may change any time."""
    metadata = site / f"nemo_gym-{version}.dist-info"
    if not metadata.is_dir() or not (site / "resources_servers").is_dir():
        return None
    own = max(path.stat().st_mtime_ns for path in Path(__file__).parent.glob("*.py"))
    return f"{version} {metadata.stat().st_mtime_ns} gymgate {gymgate.__version__} {own}"
