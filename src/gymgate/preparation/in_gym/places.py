"""Where files are looked for, and where scripts run: they write beside themselves, and the release is not theirs to change."""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .told import RefusedError

WHOLE_KINDS = ("benchmarks", "environments")
"""Directories whose scripts import one another."""


class Places:
    """The user's roots, the workspace and the release, in the order in which a name is looked up."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.workspace = Path(order["workspace"])
        self.site = Path(order["site"])
        self.roots = [Path(root) for root in order["roots"]]

    def located(self, name: str, *, made: bool = True) -> Path | None:
        """A file that a config names; without `made`, none that was made here."""
        if Path(name).is_absolute():
            return Path(name) if Path(name).exists() else None
        roots = [*self.roots, *([self.workspace] if made else []), self.site]
        return next((root / name for root in roots if (root / name).exists()), None)

    def script_root(self, name: str) -> Path:
        """The root that a script is run from: the user's own, else the workspace, where a copy is made."""
        for root in self.roots:
            if (root / name).is_file():
                return root
        if not (self.site / name).is_file():
            raise RefusedError("ConfigError", f"there is no script {name}")
        kind, server, *_ = Path(name).parts
        self._copied(Path(kind) if kind in WHOLE_KINDS else Path(kind) / server)
        return self.workspace

    def _copied(self, part: Path) -> None:
        marker = self.workspace / f".copied-{str(part).replace(os.sep, '-')}"
        if marker.exists():
            return
        target = self.workspace / part
        shutil.copytree(
            self.site / part,
            target,
            dirs_exist_ok=True,
            copy_function=shutil.copyfile,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for directory in [target, *(path for path in target.rglob("*") if path.is_dir())]:
            directory.chmod(0o755)  # a release may be read-only
        marker.touch()

    @contextlib.contextmanager
    def importing_from(self, first: Path) -> Iterator[None]:
        """In `first`, with it, the user's roots and the workspace before everything else that is imported."""
        kept, path = Path.cwd(), list(sys.path)
        sys.path[:0] = [str(first), *map(str, self.roots), str(self.workspace)]
        os.chdir(first)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            os.chdir(kept)
            sys.path[:] = path

    def execute(self, script: Path, arguments: Sequence[str]) -> None:
        """Run a script as a program of its own, in its directory."""
        kept = sys.argv
        sys.argv = [str(script), *arguments]
        try:
            with self.importing_from(script.parent):
                runpy.run_path(str(script), run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                log = self.workspace / "log.txt"
                raise RefusedError(
                    "DataError", f"{script.name} ended with exit status {error.code}; it says why in {log}"
                ) from None
        finally:
            sys.argv = kept
