"""The scans of supported releases, which ship with gymgate, so that nobody installs 1 GB to see what there is.

`locks/scans.py` makes them. Paths in them begin with a placeholder for the directory of the installed packages.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pydantic

from gymgate.core import codec
from gymgate.gym.catalog.entries import Environment

SCANS = resources.files("gymgate.gym.catalog") / "releases"
_FORMAT = pydantic.TypeAdapter(list[Environment])
_SITE, _SITE_URI = "@SITE@", "@SITE-URI@"


def has_scan(version: str) -> bool:
    """Whether the scan of a release ships."""
    return _file(version).is_file()


def load(version: str, site: Path | None) -> list[Environment]:
    """Return the environments of a release, and its agents that ship data.

    Without `site`, where the release is not installed, paths are relative to it.
    """
    text = gzip.decompress(_file(version).read_bytes()).decode()
    if site is None:
        text = text.replace(f"{_SITE_URI}/", "file://").replace(f"{_SITE}/", "")
    else:
        text = text.replace(_SITE_URI, site.as_uri()).replace(_SITE, _json_text(site))
    return _FORMAT.validate_json(text)


def packed(environments: Sequence[Environment], site: Path) -> bytes:
    """Return a scan as it ships. Equal scans give equal bytes."""
    text = _FORMAT.dump_json([*environments], exclude_defaults=True).decode()
    text = text.replace(site.as_uri(), _SITE_URI).replace(_json_text(site), _SITE)
    return gzip.compress(text.encode(), mtime=0)


def _json_text(site: Path) -> str:
    """Return a path as it is inside of JSON text."""
    return codec.dumps(str(site)).decode()[1:-1]


def _file(version: str) -> resources.abc.Traversable:
    return SCANS / f"{version}.json.gz"
