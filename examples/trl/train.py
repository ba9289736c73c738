"""Train on NeMo Gym environments with TRL's GRPOTrainer.

    python examples/trl/train.py --config examples/trl/tiny.yaml            # a minute on a CPU, no download
    python examples/trl/train.py --config examples/trl/workplace.yaml       # a real model; vLLM server at vllm_server_base_url
    python examples/trl/train.py --config ... --resume_from_checkpoint DIR

The YAML has three parts: `model` (a hub name, or `tiny`), `nemo_gym` (arguments of `NeMoGymSpec`) and `grpo` (of `GRPOConfig`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import yaml
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from gymgate.trl import NeMoGymSpec


def main(config: dict[str, Any], resume_from_checkpoint: str | None) -> GRPOTrainer:
    grpo = GRPOConfig(**config["grpo"])
    set_seed(grpo.seed)
    model, tokenizer, renderer = policy(config["model"])
    with NeMoGymSpec(**config["nemo_gym"], renderer=renderer) as spec:
        trainer = GRPOTrainer(
            model=model,
            args=grpo,
            processing_class=tokenizer,
            train_dataset=spec.train_dataset,
            eval_dataset=spec.eval_dataset,
            rollout_func=spec.rollout_func,
            reward_funcs=spec.reward_funcs,
        )
        trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    return trainer


def policy(name: str) -> tuple[Any, Any, Any]:
    """Model, tokenizer and renderer; the trainer and the spec load and choose their own for a hub name."""
    if name != "tiny":
        return name, None, None
    from tiny_policy import make_model, make_renderer, make_tokenizer

    tokenizer = make_tokenizer()
    return make_model(tokenizer), tokenizer, make_renderer(tokenizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()
    main(yaml.safe_load(args.config.read_text()), args.resume_from_checkpoint)
