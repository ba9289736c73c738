"""For tests with Agent Lightning, which is not in the other lanes: `./dev agentlightning`."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("agentlightning") is None else []


def pytest_configure(config: pytest.Config) -> None:
    """Show warnings instead of failing: Agent Lightning's dependencies give deprecation warnings."""
    config.addinivalue_line("filterwarnings", "default")
