"""The eval config that ships beside the environment, read by verifiers itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

pytest.importorskip("verifiers.v1", reason="verifiers is not installed")

CONFIG = Path(__file__).parents[2] / "environments/nemo_gym_env/configs/eval.toml"
MAIN = "from verifiers.v1.cli.eval.main import main; main()"


def test_the_shipped_eval_config_is_resolved(tmp_path: Path) -> None:
    options = ["-m", "m", "--dry-run", "--no-rich", "-o", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "@", str(CONFIG), *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [resolved] = tmp_path.glob("*/configs/resolved/eval.json")
    config = orjson.loads(resolved.read_bytes())
    taskset = config["env"]["taskset"]
    assert (taskset["id"], taskset["env"], taskset["max_calls"]) == (
        "nemo_gym_env",
        "workplace_assistant",
        24,
    )
    assert (config["num_rollouts"], config["select"]["limit"], config["push"]) == (4, 5, False)
