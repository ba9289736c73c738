"""The scan of a release, kept in the cache directory so that the next process need not read a thousand files."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pydantic

import gymgate
from gymgate.catalog.model import Environment
from gymgate.config import cache_dir

_ENVIRONMENTS = pydantic.TypeAdapter(list[Environment])


def load(site: Path, version: str) -> list[Environment] | None:
    """What `save` kept for exactly this installation and this gymgate; `None` if there is nothing usable."""
    path = _path(site, version)
    if path is None:
        return None
    try:
        return _ENVIRONMENTS.validate_json(path.read_bytes())
    except (OSError, pydantic.ValidationError):
        return None


def save(site: Path, version: str, environments: Sequence[Environment]) -> None:
    """Keep a scan; a cache that cannot be written is no error."""
    path = _path(site, version)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        with os.fdopen(handle, "wb") as file:
            file.write(_ENVIRONMENTS.dump_json(list(environments)))
        Path(name).replace(path)
    except OSError:
        return


def _path(site: Path, version: str) -> Path | None:
    """`None` where no installed distribution stands behind the files (a checkout): they may change any time."""
    metadata = site / f"nemo_gym-{version}.dist-info"
    if not metadata.is_dir() or not (site / "resources_servers").is_dir():
        return None
    own = [path.stat().st_mtime_ns for path in Path(__file__).parent.glob("*.py")]
    parts = (str(site.absolute()), metadata.stat().st_mtime_ns, gymgate.__version__, max(own))
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return cache_dir() / "catalog" / f"{digest}.json"
