"""gymgate's extras: the SDK of each, the releases that were tested, and the command that installs it beside this gymgate."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from packaging.version import InvalidVersion, Version


class SDK(NamedTuple):
    """The package that an extra integrates, and the releases that gymgate was tested with."""

    package: str
    oldest: str
    newest: str
    """Compared by as many numbers as it has: 1.16.2 is not newer than 1.16."""

    def untested(self, version: str) -> str | None:
        """Return a line about a version that is newer than all tested ones, or cannot be compared; `None` for another."""
        try:
            release = Version(version).release
        except InvalidVersion:
            return f"{version} cannot be compared with {self.newest}, the newest release that gymgate was tested with"
        tested = Version(self.newest).release
        if release[: len(tested)] <= tested:
            return None
        return f"{version} is newer than {self.newest}, the newest release that gymgate was tested with"


SDKS = {
    "nemogym": SDK("verifiers", "0.4", "0.4"),
    "inspect": SDK("inspect-ai", "0.3.285", "0.3.285"),
    "openenv": SDK("openenv", "0.10", "0.10"),
    "skyrl": SDK("skyrl", "0.4", "0.4"),
    "trl": SDK("trl", "1.15", "1.16"),
    "verl": SDK("verl", "0.9.1", "0.9"),
}
"""By extra. The bounds in pyproject.toml say the same."""


def install_command(extra: str, *others: str) -> str:
    """Return `pip install` for an extra of this gymgate, or several with commas between; `others` are further packages.

    A gymgate that was installed from a clone or a wheel is installed from there again, because no index may have it.
    """
    try:
        source = json.loads(metadata.distribution("gymgate").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        source = {}
    url = urlsplit(source.get("url", ""))
    path = Path(unquote(url.path))
    if url.scheme != "file" or not path.exists():
        target = [f"gymgate[{extra}]"]
    else:
        editable = source.get("dir_info", {}).get("editable")
        target = [*(["-e"] if editable else []), f"{path}[{extra}]"]
    return shlex.join(["pip", "install", *others, *target])
