"""For tests with Agent Lightning, which is not in the other lanes: `./dev agentlightning`."""

from __future__ import annotations

import importlib.metadata

import pytest

# Not by `find_spec`, which finds this directory.
collect_ignore_glob = [] if any(importlib.metadata.distributions(name="agentlightning")) else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Show warnings instead of failing: Agent Lightning's dependencies give deprecation warnings."""
    config.addinivalue_line("filterwarnings", "default")
