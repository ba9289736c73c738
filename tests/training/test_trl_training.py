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

import yaml
from trl import GRPOConfig

from gymgate.trl import NeMoGymSpec

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gym, pytest.mark.timeout(400)]


def test_a_shipped_config_is_one_that_trl_and_the_spec_take(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "examples/trl/workplace.yaml").read_text())
    environments = config["nemo_gym"]["environments"]
    for source in ("data", "eval_data"):
        rows = config["nemo_gym"].get(source, "example")
        assert rows == "example" or rows.keys() == environments.keys()
    with NeMoGymSpec(**{**config["nemo_gym"], "data": "example", "eval_data": "example"}) as spec:
        assert {row["environment"] for row in spec.train_dataset} == environments.keys()
    here = {"use_cpu": True, "bf16": False, "report_to": [], "output_dir": str(tmp_path)}
    GRPOConfig(**{**config["grpo"], **here})


@pytest.mark.parametrize("name", ["tiny", "parts"])
def test_the_reward_rises(name: str, tmp_path: Path) -> None:
    """`examples/trl/train.py` as a user runs it."""
    config = (ROOT / f"examples/trl/{name}.yaml").read_text()
    config = config.replace(f"outputs/trl-{name}", str(tmp_path / "run")).replace(
        'save_strategy: "no"', "save_strategy: steps"
    )
    (tmp_path / f"{name}.yaml").write_text(config + "  save_steps: 40\n")
    done = subprocess.run(
        [sys.executable, "examples/trl/train.py", "--config", str(tmp_path / f"{name}.yaml")],
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
    closing = done.stdout.splitlines()[-1]
    assert f"{steps[0]['reward']:.2f} -> {steps[-1]['reward']:.2f}" in closing
    assert f"flat in {sum(step['frac_reward_zero_std'] == 1 for step in steps)} of 40 " in closing
    assert closing.endswith(str(tmp_path / "run"))
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert mean(step["rewards/nemo_gym_reward/mean"] for step in steps[:3]) < 0.2
    assert mean(step["rewards/nemo_gym_reward/mean"] for step in steps[-5:]) > 0.8
    assert steps[-1]["nemo_gym/letter_share/prefix_misses"] == 0
    assert steps[-1]["nemo_gym/failed"] == 0
