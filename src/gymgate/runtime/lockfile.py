"""The locks that ship: a release's exact requirements, hash-pinned, for any platform and any Python >= 3.12."""

from __future__ import annotations

import re
from importlib import resources

from gymgate.runtime.interpreters import Version

_FLOORS: dict[str, Version] = dict.fromkeys(("0.3.0", "0.3.1", "0.4.0"), (3, 12, 0))
_NEWER_FLOOR: Version = (3, 13, 14)


def floor_of(release: str) -> Version:
    """Python that a nemo-gym release declares as its minimum (every release after 0.4 declares the same one)."""
    return _FLOORS.get(release, _NEWER_FLOOR)


def locked_releases() -> list[str]:
    """The releases that a lock ships for, newest first."""
    directory = resources.files("gymgate.runtime") / "locks"
    names = [re.fullmatch(r"nemo-gym-(.+)\.txt", file.name) for file in directory.iterdir()]
    return sorted((name[1] for name in names if name), reverse=True)


def read_lock(release: str) -> str | None:
    """A release's lock; `None` if there is none."""
    file = resources.files("gymgate.runtime") / "locks" / f"nemo-gym-{release}.txt"
    return file.read_text(encoding="utf-8") if file.is_file() else None


def split_lock(lock: str) -> tuple[str, str]:
    """The entry of nemo-gym, and all others; comments dropped."""
    entries = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)
    named = [entry for entry in entries if entry.strip() and not entry.startswith("#")]
    own = [entry for entry in named if entry.startswith("nemo-gym==")]
    return "".join(own), "".join(entry for entry in named if entry not in own)


def pins(lock: str) -> dict[str, str]:
    """Each package's `name==version ; marker` line, nemo-gym apart, by normalised name."""
    lines = re.findall(r"^([A-Za-z0-9][^\\\n]*?)\s*\\?$", lock, flags=re.MULTILINE)
    named = {package_of(line): line for line in lines}
    named.pop("nemo-gym", None)
    return named


def package_of(requirement: str) -> str:
    """`Typing_Extensions[x]>=4 ; marker` -> `typing-extensions`"""
    name = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement.strip())
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else requirement.strip()
