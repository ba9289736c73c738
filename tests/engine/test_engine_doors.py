"""One environment's rows through NeMo Gym's own collector and through gymgate's doors of this interpreter: the same rollouts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.agreement import ROOT, same
from benchmarks.doors import read

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(1200)]

ENVIRONMENT = "example_single_tool_call"
DOORS = ("gymgate", "verifiers", "trl")


def test_doors_give_what_nemo_gyms_collector_gives(tmp_path: Path) -> None:
    rows = ["--rows", "2", "--only", ENVIRONMENT, "--doors", ",".join(DOORS), "--keep", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks", "agreement", *rows]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = read(tmp_path / "nemo_gym.json")[ENVIRONMENT]
    assert [bool(outcome.failed) for outcome in theirs] == [False, False]
    for door in DOORS:
        for ours, expected in zip(read(tmp_path / f"{door}.json")[ENVIRONMENT], theirs, strict=True):
            assert same(ours, expected) == [True] * 4, (door, ours, expected)
