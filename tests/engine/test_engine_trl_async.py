"""AsyncGRPOTrainer trains on rollouts of another process, which samples on vLLM.

TRL's trainer needs a GPU for two things, the flash-attention kernel that it downloads and the name of the device (to say what
share of its speed is used); here torch computes the same attention, and no device is named.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # its import warns

from benchmarks.engine.weights import FileWeights  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # noqa: E402
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: E402

from gymgate.core.errors import StackLostError  # noqa: E402
from gymgate.trl import NeMoGymSpec  # noqa: E402
from support.trl_rows import ENVIRONMENT, ONE_LETTER, arguments  # noqa: E402

pytestmark = [
    pytest.mark.gym,
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]


def attention_by_torch(
    query: Any, key: Any, value: Any, q_ends: Any, k_ends: Any, *_: Any, softmax_scale: float, **__: Any
) -> Any:
    """Each segment of queries against its keys, the last query seeing them all."""
    out = []
    for number in range(len(q_ends) - 1):
        q = query[q_ends[number] : q_ends[number + 1]].transpose(0, 1)
        k, v = (x[k_ends[number] : k_ends[number + 1]].transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        out.append(
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale)
        )
    return torch.cat(out, 1).transpose(0, 1)


def spec_of(**more: Any) -> NeMoGymSpec:
    wanted = {"data": ONE_LETTER, "score_truncated": True, **more}
    return NeMoGymSpec(ENVIRONMENT, limits={"timeout_s": 300}, **wanted)


def config(folder: Path, url: str, **more: Any) -> AsyncGRPOConfig:
    wanted = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 8,
        "token_budget": 0,
        "queue_maxsize": 8,  # a full queue stops the sampling, which the trainer's steps share the cores with
        "max_inflight_tasks": 8,
        **more,
    }
    return AsyncGRPOConfig(**arguments(folder, vllm_server_base_url=url, **wanted))


@pytest.mark.heavy
def test_the_trainer_trains_on_what_the_server_samples(
    model_directory: Path, tokenizer: Any, tmp_path: Path, vllm_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trl.experimental.async_grpo.packing._flash_attn",
        lambda: SimpleNamespace(flash_attn_varlen_func=attention_by_torch),
    )
    monkeypatch.setattr(
        "trl.experimental.async_grpo.async_grpo_trainer.get_peak_flops_per_device", lambda *_: None
    )
    args = config(
        tmp_path,
        vllm_url,
        learning_rate=1e-5,
        max_steps=3,
        dtype="float32",
        save_steps=3,
        save_strategy="steps",
        save_only_model=True,  # an optimizer's state would be another gigabyte
    )
    transfer = FileWeights(vllm_url)

    def trainer_of(args: AsyncGRPOConfig) -> AsyncGRPOTrainer:
        worker = spec_of().rollout_worker(args, tokenizer)
        made = AsyncGRPOTrainer(
            model=str(model_directory),
            args=args,
            processing_class=tokenizer,
            train_dataset=worker._spec.train_dataset,
            rollout_worker=worker,
            weight_transfer=transfer,
        )
        worker.follow(made)
        return made

    trainer = trainer_of(args)
    try:
        trainer.train()
        args.max_steps, updates = 4, transfer.updates
        resumed = trainer_of(args)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    finally:
        model = AutoModelForCausalLM.from_pretrained(model_directory, dtype="float32")
        transfer.send_weights(model.named_parameters())
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert updates == 4  # at the start, and after each step
    assert steps[0]["ratio"] == pytest.approx(1.0, abs=1e-3)  # the server's logprobs are the trainer's
    assert abs(steps[0]["kl"]) < 1e-3
    assert steps[-1]["sample/staleness_max"] <= args.max_staleness
    logged = {name: value for step in steps for name, value in step.items()}
    assert logged["nemo_gym/letter_share/prefix_misses"] == logged["nemo_gym/failed"] == 0
    assert 0 <= logged["nemo_gym/letter_share/reward"] < 1
    kept = json.loads((tmp_path / "checkpoint-3/gymgate_rollouts.json").read_text())
    assert 1 <= kept["position"] <= 3  # of one group a step; many more wait in the queue
    assert kept["model_version"] == 4
    assert resumed._groups_before_resume == resumed.rollout_worker.position == kept["position"]
    assert resumed.model_version == 4 + 2


def until(worker: Any, ready: Callable[[], bool]) -> None:
    """Wait for what the process does; the test's timeout bounds it."""
    while not ready():
        worker.check_health(60)
        time.sleep(0.02)


def test_samples_keep_to_the_contract_and_the_process_ends(
    tmp_path: Path, tokenizer: Any, vllm_url: str
) -> None:
    args = config(tmp_path, vllm_url)
    worker = spec_of(rows=3).rollout_worker(args, tokenizer)
    worker.position = 7
    groups: list[int] = []

    def delivered() -> list[int]:
        groups.extend(group for group, _ in worker.newly_delivered())
        return groups

    worker.update_model_version(5)
    worker.start()
    process = worker._process
    try:
        until(worker, lambda: worker.rollout_buffer.qsize() == 8)
        samples = [worker.rollout_buffer.get(timeout=300) for _ in range(16)]
        until(worker, lambda: len(delivered()) >= 4)
    finally:
        worker.stop()
    assert process._closed
    for sample in samples:
        assert isinstance(sample, RolloutSample)
        assert len(sample.input_ids) == len(sample.completion_mask) == len(sample.old_log_probs)
        assert sample.model_version == 5
        assert sample.prompt == [{"role": "user", "content": "a"}]
        assert all(value < 0 for value in sample.old_log_probs[sample.completion_mask == 1])
        assert not sample.old_log_probs[sample.completion_mask == 0].any()
    assert [sample.group_id for sample in samples] == [group for group in groups[:4] for _ in range(4)]
    group = samples[:4]
    assert sum(sample.advantage for sample in group) == pytest.approx(0, abs=1e-5)
    figures = worker.metrics_queue.get(timeout=10)
    assert figures["nemo_gym/letter_share/failed"] == (0.0, 4.0)


def test_a_killed_process_reaches_the_trainer(tmp_path: Path, tokenizer: Any, vllm_url: str) -> None:
    worker = spec_of().rollout_worker(config(tmp_path, vllm_url), tokenizer)
    worker.start()
    try:
        worker._process.kill()
        with pytest.raises(StackLostError, match=" -9"):
            until(worker, lambda: False)
    finally:
        worker.stop()
