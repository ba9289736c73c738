"""For tests with SkyRL, which is in no lane of `./dev`: see docs/test-matrix.md."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # `examples` as a package

# Not by `find_spec`, which finds this directory.
INSTALLED = any(importlib.metadata.distributions(name="skyrl"))
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Show warnings instead of failing: what SkyRL imports gives deprecation warnings."""
    config.addinivalue_line("filterwarnings", "default")
