"""TRL's GRPOTrainer in server mode on vLLM: what it samples, and whether its weights arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: run ./dev engine")
pytest.importorskip("trl", reason="needs trl: run ./dev engine")

from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from gymgate.trl import NeMoGymSpec
from support.trl_server_mode import weights_over_files

pytestmark = [pytest.mark.gym, pytest.mark.timeout(500), pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[2]
LETTERS = ROOT / "examples/own_environment/resources_servers/letter_share"


def test_the_servers_logprobs_are_those_of_the_model_in_training(
    vllm_url: str,
    model_directory: Path,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TRL recomputes each sampled id's logprob; the server's agrees before an update and after it, so the weights arrived."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    transfer = weights_over_files(monkeypatch, vllm_url)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype="float32")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        max_steps=2,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        temperature=0.9,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=vllm_url,
    )
    with NeMoGymSpec(
        str(LETTERS / "configs/letter_share.yaml"),
        data=str(LETTERS / "data/one_letter.jsonl"),
        limits={"timeout_s": 120},
        score_truncated=True,
    ) as spec:
        trainer = GRPOTrainer(
            model=model,
            args=args,
            processing_class=tokenizer,
            train_dataset=spec.train_dataset,
            rollout_func=spec.rollout_func,
            reward_funcs=spec.reward_funcs,
        )
        try:
            trainer.train()
        finally:
            transfer.send_weights(before.items())
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == 2
    assert transfer.updates == 3  # before each step, and above
    assert any((parameter != before[name]).any() for name, parameter in model.named_parameters())
    for entry in logged:
        assert entry["sampling/sampling_logp_difference/max"] < 1e-3
        assert entry["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-3)
        assert entry["nemo_gym/failed"] == 0
