"""A collection on a Ray cluster of three nodes on this machine, one of which is killed, and another one added."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from benchmarks.ray_nodes import add_node, ray_cluster

from gymgate.runs.stored.layout import ROLLOUTS
from gymgate.runs.stored.record import CollectedRollout, read_values
from support.stacks import SIMPLE, runtime

pytest.importorskip("ray", reason="needs Ray: run ./dev train")
pytestmark = [
    pytest.mark.gym,
    pytest.mark.heavy,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # Ray's own
]


def test_a_node_that_is_lost_and_one_that_is_added_lose_no_rollout(tmp_path: Path) -> None:
    with ray_cluster(1, 1, 1) as cluster:
        found = runtime()
        gym = f"{found.version}@{found.interpreter}" if found.interpreter else found.version
        command = [
            sys.executable,
            "-m",
            "gymgate",
            "run",
            SIMPLE,
            "-o",
            str(tmp_path / "run"),
            "-r",
            "300",
        ]
        command += ["-c", "12", "--ray", cluster.address, "--gym", gym]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            log = tmp_path / "run" / ROLLOUTS
            deadline = time.monotonic() + 120
            while not (log.exists() and log.stat().st_size > 300_000) and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
            add_node(cluster, 1)
            _, said = process.communicate(timeout=150)
        assert process.returncode == 0, said
        assert " 3 nodes" in said
        assert "is lost" in said
        assert "2 are left" in said
    counted = Counter(
        CollectedRollout.model_validate(value).identity
        for _, value in read_values(tmp_path / "run" / ROLLOUTS)
    )
    assert len(counted) == 1500
    assert set(counted.values()) == {1}
