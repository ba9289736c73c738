"""The lock of each release: its exact requirements with hashes, for any platform and any Python from 3.12 on."""

from __future__ import annotations

import re
from importlib import resources

from packaging.utils import canonicalize_name

from gymgate.gym.runtime.interpreters import Version

PYTHON_FLOOR: Version = (3, 13, 14)
"""The oldest Python that nemo-gym declares from 0.5 on."""
LOCKS = resources.files("gymgate.gym.runtime") / "locks"


def read_lock(release: str) -> str | None:
    """Return a release's lock; `None` if there is none."""
    file = LOCKS / f"nemo-gym-{release}.txt"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def split_lock(lock: str) -> tuple[str, str]:
    """Return the entry of nemo-gym, and all others without the comments."""
    entries = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)
    own = [entry for entry in entries if entry.startswith("nemo-gym==")]
    others = [entry for entry in entries if entry.strip() and not entry.startswith(("#", "nemo-gym=="))]
    return "".join(own), "".join(others)


def pins(lock: str) -> dict[str, str]:
    """Return each package's `name==version ; marker`, by normalised name, without nemo-gym."""
    lines = re.findall(r"^([A-Za-z0-9][^\\\n]*?)\s*\\?$", lock, flags=re.MULTILINE)
    return {package_of(line): line for line in lines if package_of(line) != "nemo-gym"}


def package_of(requirement: str) -> str:
    """`Typing_Extensions[x]>=4 ; marker` -> `typing-extensions`; returns the text itself if it begins with no name."""
    name = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    return canonicalize_name(name[0]) if name else requirement.strip()
