"""For tests with OpenEnv, which is not in the other lanes: `./dev inspect`."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # `examples` as a package
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # its import warns

# Not by `find_spec`, which finds this directory.
collect_ignore_glob = [] if any(importlib.metadata.distributions(name="openenv")) else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Show warnings instead of failing: OpenEnv, TRL and what they import give deprecation warnings."""
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture
def token_server() -> Iterator[object]:
    from support.token_server import TokenServer

    with TokenServer() as server:
        yield server
