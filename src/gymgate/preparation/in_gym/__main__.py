"""`python in_gym/__main__.py`: imports the package around it by a name that no module of NeMo Gym has."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

NAME = "gymgate_in_gym"


def main() -> int:
    directory = Path(__file__).parent
    sys.path[:] = [entry for entry in sys.path if entry != str(directory)]
    spec = importlib.util.spec_from_file_location(
        NAME, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    status: int = importlib.import_module(f"{NAME}.program").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
