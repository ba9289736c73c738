"""What was fetched earlier, how, and that it still lies there unchanged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def digest_of(path: Path) -> str:
    """sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Stamp:
    """The note on one file that a config declares."""

    def __init__(self, workspace: Path, declared: str) -> None:
        self._path = workspace / ".prepared" / f"{hashlib.sha256(declared.encode()).hexdigest()[:16]}.json"

    def read(self) -> dict[str, Any] | None:
        """`path`, `recipe` and `origin`."""
        try:
            value = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None
        return value if isinstance(value, dict) else None

    def valid(self, recipe: dict[str, Any]) -> dict[str, Any] | None:
        """The same, if the file was made by this recipe and is what it was."""
        noted = self.read()
        if noted is None or noted["recipe"] != json.loads(json.dumps(recipe)):
            return None
        file = Path(noted["path"])
        return noted if file.is_file() and digest_of(file) == noted["origin"]["sha256"] else None

    def write(self, path: Path, recipe: dict[str, Any], origin: dict[str, Any]) -> None:
        self._path.parent.mkdir(exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps({"path": str(path), "recipe": recipe, "origin": origin}))
        unfinished.replace(self._path)
