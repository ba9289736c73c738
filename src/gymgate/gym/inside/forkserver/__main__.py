"""Load the package `inside` under a name that nobody else uses, and be a fork server."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

NAME = "gymgate_inside"
PACKAGE = Path(__file__).parents[1]


def load() -> None:
    """Import the package without its path on `sys.path`, where servers would find our modules."""
    spec = importlib.util.spec_from_file_location(NAME, PACKAGE / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])


if __name__ == "__main__":
    sys.path.pop(0)
    load()
    importlib.import_module(f"{NAME}.forkserver.forking").main()
