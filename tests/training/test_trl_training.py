"""TRL's own GRPOTrainer learns through a real NeMo Gym environment, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gym, pytest.mark.timeout(400)]


def test_the_reward_rises(tmp_path: Path) -> None:
    """`examples/trl/train.py` as a user runs it."""
    config = (ROOT / "examples/trl/tiny.yaml").read_text()
    config = config.replace("outputs/trl-tiny", str(tmp_path / "run")).replace(
        'save_strategy: "no"', "save_strategy: steps"
    )
    (tmp_path / "tiny.yaml").write_text(config + "  save_steps: 40\n")
    done = subprocess.run(
        [sys.executable, "examples/trl/train.py", "--config", str(tmp_path / "tiny.yaml")],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
        },  # threads that wait for each other are slow on a busy machine
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    state = json.loads((tmp_path / "run" / "checkpoint-40" / "trainer_state.json").read_text())
    steps = [entry for entry in state["log_history"] if "reward" in entry]
    assert mean(step["reward"] for step in steps[:3]) < 0.2
    assert mean(step["reward"] for step in steps[-5:]) > 0.8
    assert steps[-1]["nemo_gym/letter_share/prefix_misses"] == 0
    assert steps[-1]["nemo_gym/failed"] == 0
