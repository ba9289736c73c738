"""A Ray of the tests' own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import pytest

STARTS = 4


@contextmanager
def ray_on_loopback(**options: Any) -> Iterator[None]:
    """Ray, which gives its own processes 30 s to come up: little on a machine with other work."""
    if "ray" not in sys.modules:  # Ray reads it once; a node's address does not keep it on loopback
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray = pytest.importorskip("ray")
    with TemporaryDirectory(
        prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:  # short: sockets lie in it
        try:
            for attempt in range(STARTS):
                try:
                    ray.init(
                        include_dashboard=False,
                        log_to_driver=False,
                        _temp_dir=f"{folder}/{attempt}",
                        **options,
                    )
                    break
                except Exception as error:  # Ray raises no other class
                    ray.shutdown()
                    if "timed out during startup" not in str(error) or attempt == STARTS - 1:
                        raise
            yield
        finally:
            ray.shutdown()
