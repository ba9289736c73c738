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


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[Any]:
    """A cluster of as many nodes on this machine, each with so many CPUs; Ray's `Cluster`. Its first node stays."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "100")
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")  # several raylets on loopback
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for number in cpus:
            cluster.add_node(
                num_cpus=number, include_dashboard=False, object_store_memory=80_000_000, wait=False
            )
        cluster.wait_for_nodes(100)
        yield cluster
    finally:
        cluster.shutdown()
