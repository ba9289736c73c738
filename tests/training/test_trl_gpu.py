"""End to end where there are GPUs: the model in process on one, and with vLLM on a second one."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

torch = pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

ROOT = Path(__file__).parents[2]
MODEL = os.environ.get("GYMGATE_TEST_MODEL", "Qwen/Qwen3-0.6B")
"""Hub name or directory of what vLLM serves."""

pytestmark = [pytest.mark.gym, pytest.mark.timeout(1500)]


def train(folder: Path, config: dict[str, Any], *arguments: str, devices: str = "0") -> list[dict[str, Any]]:
    """What `examples/trl/train.py` logged."""
    part = config["grpo"]
    part.update(output_dir=str(folder / "run"), save_strategy="steps", save_steps=part["max_steps"])
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "examples/trl/train.py", "--config", str(folder / "config.yaml"), *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": devices},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    state = json.loads(
        (folder / "run" / f"checkpoint-{part['max_steps']}" / "trainer_state.json").read_text()
    )
    return [entry for entry in state["log_history"] if "reward" in entry]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_reward_rises_on_a_gpu(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "examples/trl/tiny.yaml").read_text())
    del config["grpo"]["use_cpu"]
    steps = train(tmp_path, config)
    assert steps[0]["reward"] < 0.3
    assert steps[-1]["reward"] > 0.7


@pytest.fixture
def vllm_server(tmp_path: Path) -> Iterator[str]:
    """Stock vLLM on the second GPU, started as docs/training.md says; the trainer waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["vllm", "serve", MODEL, "--port", str(port), "--max-model-len", "8192"]
    command += ["--gpu-memory-utilization", "0.6", "--max-logprobs", "-1"]
    command += ["--weight-transfer-config", '{"backend": "nccl"}', "--logprobs-mode", "processed_logprobs"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with (tmp_path / "vllm.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2 or importlib.util.find_spec("vllm") is None,
    reason="needs two GPUs and vllm (pip install 'trl[vllm]'), and GYMGATE_TEST_MODEL where the hub is out of reach",
)
def test_training_with_vllm(tmp_path: Path, vllm_server: str) -> None:
    """A few steps on two environments: nothing fails, and the server's logprobs are the trainer's."""
    config = yaml.safe_load((ROOT / "examples/trl/workplace.yaml").read_text())
    config["model"] = MODEL
    config["nemo_gym"].update(data="example", eval_data=None, score_truncated=True)
    config["grpo"].update(max_steps=3, max_completion_length=512, vllm_server_timeout=600, bf16=True)
    config["grpo"].update(eval_strategy="no", report_to=[])
    steps = train(tmp_path, config, "--vllm_server_base_url", vllm_server)
    assert len(steps) == 3
    assert sum(step.get("nemo_gym/failed", 0) for step in steps) == 0
    assert sum(step.get("nemo_gym/prefix_misses", 0) for step in steps) == 0
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) < 0.05


@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None,
    reason="needs a GPU and vllm (pip install 'trl[vllm]'), and GYMGATE_TEST_MODEL where the hub is out of reach",
)
@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleep mode"])
def test_training_with_vllm_in_the_trainers_process(sleeps: bool, tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "examples/trl/workplace.yaml").read_text())
    config["model"] = MODEL
    config["nemo_gym"].update(data="example", eval_data=None, score_truncated=True)
    config["grpo"].update(max_steps=3, max_completion_length=512, bf16=True, eval_strategy="no", report_to=[])
    config["grpo"].update(vllm_mode="colocate", vllm_enable_sleep_mode=sleeps, vllm_max_model_length=8192)
    config["grpo"]["vllm_gpu_memory_utilization"] = 0.3
    steps = train(tmp_path, config)
    assert len(steps) == 3
    assert sum(step.get("nemo_gym/failed", 0) for step in steps) == 0
    assert max(step["sampling/sampling_logp_difference/mean"] for step in steps) < 0.05
