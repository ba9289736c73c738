"""`gymgate compare` on a real pair: the model at two temperatures, against a computation of its own from the stored files."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(900)]

ENVIRONMENTS = ("spartqa", "citation_if")
REPEATS = 2


def gymgate(*arguments: str | Path) -> str:
    """Standard output of the command, which must succeed."""
    command = [sys.executable, "-m", "gymgate", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def rewards(run: Path) -> dict[tuple[str, str], dict[int, float]]:
    """By environment and row, then by repeat."""
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for line in (run / "rollouts.jsonl").read_text().splitlines():
        value = json.loads(line)
        found[value["environment"], value["row_key"]][value["repeat"]] = value["reward"]
    return found


def test_two_temperatures(vllm_url: str, tmp_path: Path) -> None:
    runs = [tmp_path / "t0", tmp_path / "t1"]
    for temperature, run in enumerate(runs):
        sampling = ("--sampling", f"temperature={temperature}", "--sampling", "max_tokens=32")
        gymgate("run", *ENVIRONMENTS, "-r", str(REPEATS), "-b", f"{vllm_url}/v1", *sampling, "-o", run)
    compared: dict[str, Any] = json.loads(gymgate("compare", *runs, "--json"))["compared"][0]
    rows = {row["environment"]: row for row in compared["environments"]}
    first, second = map(rewards, runs)
    assert first.keys() == second.keys()
    assert {len(group) for group in (*first.values(), *second.values())} == {REPEATS}
    for name in ENVIRONMENTS:
        means = [
            statistics.fmean(second[key][repeat] - first[key][repeat] for repeat in range(REPEATS))
            for key in first
            if key[0] == name
        ]
        assert rows[name]["pairs"] == len(means) * REPEATS
        assert rows[name]["difference"] == pytest.approx(statistics.fmean(means))
        error = statistics.stdev(means) / math.sqrt(len(means))
        assert rows[name]["difference_se"] == (pytest.approx(error) if error else None)
    changed = sum(
        statistics.fmean(first[key].values()) != statistics.fmean(second[key].values()) for key in first
    )
    assert len(compared["flips"]) == changed
