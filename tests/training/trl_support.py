"""What the tests with TRL's trainers share. Needs torch and TRL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from examples.token_server.weights import FileWeightTransfer
from examples.trl.tiny_policy import make_model, make_renderer, make_tokenizer
from transformers import set_seed

ROOT = Path(__file__).parents[2]
LETTERS = ROOT / "examples/own_environment/resources_servers/letter_share"
ENVIRONMENT = str(LETTERS / "configs/letter_share.yaml")
ONE_LETTER = str(LETTERS / "data/one_letter.jsonl")


def tiny() -> tuple[Any, Any, Any]:
    """The model that the token server has at its start, with its tokenizer and renderer."""
    set_seed(0)
    tokenizer = make_tokenizer()
    return make_model(tokenizer), tokenizer, make_renderer(tokenizer)


def over_files(monkeypatch: pytest.MonkeyPatch, base_url: str) -> FileWeightTransfer:
    """TRL as if vLLM were installed, with weights sent through a file where TRL sends them over NCCL."""
    transfer = FileWeightTransfer(base_url)

    def update(client: Any, metadata: Any, named_params: Iterator[tuple[str, Any]]) -> None:
        transfer.pause()
        transfer.send_weights(named_params)
        transfer.resume()

    for module in ("trl.generation.vllm_generation", "trl.generation.vllm_client"):
        monkeypatch.setattr(f"{module}.is_vllm_available", lambda: True)
    monkeypatch.setattr(
        "trl.generation.vllm_client.VLLMClient.init_communicator", lambda client, device: None
    )
    monkeypatch.setattr("trl.generation.vllm_client.VLLMClient.update_named_params", update)
    return transfer


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    """Of a `GRPOConfig` or `AsyncGRPOConfig`, for a CPU."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
        **more,
    }
