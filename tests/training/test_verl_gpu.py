"""verl from its command line to its weights, on a GPU: two steps of GRPO through a real NeMo Gym environment."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("verl", reason="training tests need verl: see docs/training.md")

ROOT = Path(__file__).parents[2]
LETTERS = ROOT / "examples/own_environment/resources_servers/letter_share"

pytestmark = [
    pytest.mark.gym,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: verl has no engine for a CPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install vllm==0.24.0"
    ),
]

AGENT = f"""
- name: nemo_gym
  _target_: gymgate.verl.NeMoGymAgentLoop
  environments: [{LETTERS / "configs/letter_share.yaml"}]
  renderer: qwen3
  score_truncated: true
"""


def save_model(folder: Path) -> None:
    """Two random layers over a tokenizer of single characters; nothing is downloaded. vLLM's kernels want heads of 64."""
    from examples.trl.tiny_policy import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "head_dim": 64}
    make_model(tokenizer, **shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_two_steps(tmp_path: Path) -> None:
    """NeMo Gym's figures and a gradient are in verl's log, and the servers' logprobs are those of the trained model."""
    save_model(tmp_path / "model")
    (tmp_path / "agent.yaml").write_text(AGENT)
    log = tmp_path / "log.jsonl"
    rows = f"{{{LETTERS / 'configs/letter_share.yaml'}:{LETTERS / 'data/one_letter.jsonl'}}}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "verl.trainer.main_ppo"),
            f"actor_rollout_ref.model.path={tmp_path / 'model'}",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.load_format=safetensors",
            "actor_rollout_ref.rollout.calculate_log_probs=true",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
            "actor_rollout_ref.rollout.enforce_eager=true",
            "actor_rollout_ref.rollout.agent.num_workers=2",
            "actor_rollout_ref.rollout.agent.default_agent_loop=nemo_gym",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'agent.yaml'}",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.actor.optim.lr=0.01",
            f"data.train_files={rows}",
            f"data.val_files={rows}",
            "data.custom_cls.path=pkg://gymgate.verl",
            "data.custom_cls.name=NeMoGymDataset",
            "data.train_batch_size=8",
            "data.max_prompt_length=400",
            "data.max_response_length=12",
            "algorithm.adv_estimator=grpo",
            "trainer.v1.sampler.custom_sampler.path=pkg://gymgate.verl",
            "trainer.v1.sampler.custom_sampler.name=NeMoGymReplayBuffer",
            "trainer.logger=[file]",
            "trainer.n_gpus_per_node=1",
            "trainer.val_before_train=false",
            "trainer.test_freq=2",
            "trainer.save_freq=-1",
            "trainer.total_training_steps=2",
        ],
        cwd=tmp_path,
        env={**os.environ, "VERL_FILE_LOGGER_PATH": str(log)},
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    trained = [step for step in steps if "actor/grad_norm" in step]
    assert len(trained) == 2
    for step in trained:
        assert step["nemo_gym/letter_share/failed"] == 0
        assert step["nemo_gym/letter_share/prefix_misses"] == 0
        assert step["training/rollout_probs_diff_max"] < 0.05
    assert any("val-core/letter_share/reward/mean@1" in step for step in steps)
