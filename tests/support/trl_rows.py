"""What the tests with TRL's trainers share. Needs torch and TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.trl.tiny_policy import make_model, make_renderer, make_tokenizer
from transformers import set_seed
from trl import GRPOConfig

from gymgate.trl import NeMoGymSpec

ROOT = Path(__file__).parents[2]
LETTERS = ROOT / "examples/own_environment/resources_servers/letter_share"
ENVIRONMENT = str(LETTERS / "configs/letter_share.yaml")
ONE_LETTER = str(LETTERS / "data/one_letter.jsonl")


def tiny() -> tuple[Any, Any, Any]:
    """A random model that is the same every time, with its tokenizer and renderer."""
    set_seed(0)
    tokenizer = make_tokenizer()
    return make_model(tokenizer), tokenizer, make_renderer(tokenizer)


def make_trainer(cls: Any, spec: NeMoGymSpec, folder: Path, **more: Any) -> Any:
    """A `GRPOTrainer` of the given class that trains the tiny model on a spec's rows, 8 rollouts a batch in groups of 4."""
    model, tokenizer, spec.renderer = tiny()
    wanted = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8, **more}
    return cls(
        model=model,
        args=GRPOConfig(**arguments(folder, **wanted)),
        processing_class=tokenizer,
        train_dataset=spec.train_dataset,
        rollout_func=spec.rollout_func,
        reward_funcs=spec.reward_funcs,
    )


def arguments(folder: Path, **more: Any) -> dict[str, Any]:
    """Of a `GRPOConfig`, for a CPU."""
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
