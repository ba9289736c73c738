"""For tests with Inspect AI, which is not in the other lanes: `./dev inspect`."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("inspect_ai") is None else []


def pytest_configure(config: pytest.Config) -> None:
    """Show warnings instead of failing: Inspect and what it imports give deprecation warnings."""
    config.addinivalue_line("filterwarnings", "default")
