"""What the tests with TRL's trainers share. Needs torch and TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.trl.tiny_policy import make_model, make_renderer, make_tokenizer
from transformers import set_seed

ROOT = Path(__file__).parents[2]
LETTERS = ROOT / "examples/own_environment/resources_servers/letter_share"
ENVIRONMENT = str(LETTERS / "configs/letter_share.yaml")
ONE_LETTER = str(LETTERS / "data/one_letter.jsonl")


def tiny() -> tuple[Any, Any, Any]:
    """A random model that is the same every time, with its tokenizer and renderer."""
    set_seed(0)
    tokenizer = make_tokenizer()
    return make_model(tokenizer), tokenizer, make_renderer(tokenizer)


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
