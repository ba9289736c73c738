"""`python -m benchmarks curve` in its smallest form: the real model, real servers, two optimizer steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("trl", reason="needs trl: run ./dev engine")
pytest.importorskip("gguf", reason="needs gguf: run ./dev engine")

ROOT = Path(__file__).parents[2]
SMALLEST = [
    "--seeds",
    "0",
    "--steps",
    "2",
    "--prompts",
    "1",
    "--completions",
    "4",
    "--train",
    "8",
    "--held-out",
    "8",
]

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(1300)]


def test_it_measures_trains_and_measures_again(tmp_path: Path, model_directory: Path) -> None:
    """A second run of the command finds everything done."""
    results = run(tmp_path)
    start, (seed,) = results["start"], results["seeds"]
    assert start["before"]["n"] == seed["after"]["n"] == 8
    assert start["best_constant"] == 1 / 8  # every answer is another one
    assert len(seed["training_rewards"]) == 2
    assert ElementTree.parse(tmp_path / "curve.svg").getroot().tag.endswith("svg")
    again = run(tmp_path)
    assert (again["start"], again["seeds"]) == (start, [seed])


def run(out: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "curve", "--out", str(out), *SMALLEST],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "results.json").read_text())
