"""TRL's GRPOTrainer with vLLM in its own process (`vllm_mode="colocate"`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: run ./dev engine")
pytest.importorskip("trl", reason="needs trl: run ./dev engine")
pytest.importorskip("vllm", reason="needs vLLM: run ./dev engine")

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(1600)]

ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""On a busy machine, threads that wait for each other at every layer make vLLM several times slower than one thread is."""
ASLEEP_AGAIN = ["wake weights", "wake kv_cache", "sleep 2"]


def test_a_training_samples_in_its_own_process(tmp_path: Path, model_directory: Path) -> None:
    """Sampled logprobs are those of the model in training, before an update and after it; vLLM sleeps between batches.

    The second evaluation comes without a step in between, when TRL itself sends no weights.
    """
    program = Path(__file__).with_name("trl_colocate_program.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(model_directory)],
        env={
            **ONE_THREAD,
            **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
            **os.environ,
        },
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["log"]) == 2
    assert result["changed"]
    for entry in result["log"]:
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
        assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-3)
        assert entry["nemo_gym/failed"] == entry["nemo_gym/prefix_misses"] == 0
    assert [entry["eval_nemo_gym/failed"] for entry in result["evaluations"]] == [0, 0]
    assert result["calls"] == ["sleep 2", *ASLEEP_AGAIN * 4]
    assert result["left"] == 0
