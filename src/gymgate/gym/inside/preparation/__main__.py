"""`python preparation/__main__.py`: imports the package `inside` by a name that no module of NeMo Gym has."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

NAME = "gymgate_inside"
PACKAGE = Path(__file__).parents[1]

if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
    spec = importlib.util.spec_from_file_location(NAME, PACKAGE / "__init__.py")
    assert spec is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    sys.exit(importlib.import_module(f"{NAME}.preparation.program").main())
