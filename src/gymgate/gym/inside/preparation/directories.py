"""Where files are looked up and where scripts run. Scripts write beside themselves, so the release's run in a copy."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import runpy
import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from .events import refusal

KINDS = ("benchmarks", "environments", "resources_servers", "responses_api_agents")
"""Directories whose scripts import, read and write one another's files."""
LARGE = 1 << 20
"""Bytes from which a file of the release is linked instead of copied: media."""


class Directories:
    """The user's roots, the workspace and the release, in the order in which a name is looked up."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.workspace = Path(order["workspace"])
        self.site = Path(order["site"])
        self.roots = [Path(root) for root in order["roots"]]
        self.is_editable = bool(order["editable"])
        """Whether the release is the user's own, such as a checkout."""

    def find(self, name: str, *, in_workspace: bool = True) -> Path | None:
        """A file that a config names; without `in_workspace`, not one that was made there."""
        roots = [*self.roots, *([self.workspace] if in_workspace else []), self.site]
        return next((root / name for root in roots if (root / name).exists()), None)

    def script_root(self, name: str) -> Path:
        """The root that a script is run from: the user's own, else the workspace with a copy of the release."""
        for root in self.roots:
            if (root / name).is_file():
                return root
        if not (self.site / name).is_file():
            raise refusal("ConfigError", f"there is no script {name}")
        self._copy_release()
        return self.workspace

    def _copy_release(self) -> None:
        """Once for each workspace: 5,000 small files, a second. Later only what the user has changed in the release."""
        marker = self.workspace / ".copied.json"
        copied: dict[str, list[int]] = json.loads(marker.read_text()) if marker.exists() else {}
        if copied and not self.is_editable:
            return
        stamps = {}
        walks = (os.walk(self.site / kind, followlinks=True) for kind in KINDS)
        for parent, directories, names in chain.from_iterable(walks):
            directories[:] = [name for name in directories if not _is_made(name)]
            below = Path(parent).relative_to(self.site)
            (self.workspace / below).mkdir(parents=True, exist_ok=True)
            for path in (Path(parent, name) for name in names if not _is_made(name)):
                if path.exists():  # else a dangling link
                    status, name = path.stat(), str(below / path.name)
                    stamps[name] = [status.st_size, status.st_mtime_ns]
                    if copied.get(name) != stamps[name]:
                        _copy(path, self.workspace / name)
        for name in copied.keys() - stamps.keys():
            (self.workspace / name).unlink(missing_ok=True)
        marker.write_text(json.dumps(stamps))

    @contextlib.contextmanager
    def importing_from(self, first: Path, others: Sequence[Path] = ()) -> Iterator[None]:
        """Work in `first` and import from it, `others`, the user's roots and the workspace before everything else."""
        working_directory, path = Path.cwd(), list(sys.path)
        sys.path[:0] = [str(directory) for directory in (first, *others, *self.roots, self.workspace)]
        os.chdir(first)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            os.chdir(working_directory)
            sys.path[:] = path

    def execute(self, script: Path, arguments: Sequence[str]) -> None:
        """Run a script as a program of its own, in its directory."""
        argv, sys.argv = sys.argv, [str(script), *arguments]
        try:
            with self.importing_from(script.parent):
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                ended = f"{script.name} ended with exit status {error.code}: {self._last_line()}"
                raise refusal("DataError", f"{ended}; its arguments come after --") from None
        finally:
            sys.argv = argv

    def _last_line(self) -> str:
        """The last line of the log, which everything here writes to."""
        sys.stdout.flush()
        sys.stderr.flush()
        lines = (self.workspace / "log.txt").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_made(name: str) -> bool:
    """Whether servers make such a file or directory beside their code: virtual environments, clones, caches."""
    return name.startswith(".") or name == "__pycache__"


def _copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)  # it may be a link into the release
    if source.stat().st_size < LARGE:
        shutil.copyfile(source, target)
    else:
        target.symlink_to(source)
