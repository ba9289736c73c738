"""Train on NeMo Gym environments with TRL's GRPOTrainer.

    python examples/trl/train.py --config examples/trl/tiny.yaml            # a minute on a CPU, no download
    python examples/trl/train.py --config examples/trl/parts.yaml           # the same with two rewards
    python examples/trl/train.py --config examples/trl/workplace.yaml       # a real model; vLLM server at vllm_server_base_url
    python examples/trl/train.py --config ... --vllm_server_base_url URL --resume_from_checkpoint DIR

The YAML has three parts: `model` (a hub name or directory, or `tiny`), `nemo_gym` (arguments of `NeMoGymSpec`) and `grpo` (of
`GRPOConfig`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from gymgate import ConfigError, DataError
from gymgate.trl import NeMoGymSpec


def main(config: dict[str, Any], resume_from_checkpoint: str | None) -> Any:
    trainer = train(config, resume_from_checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(closing_line(trainer.state.log_history, trainer.args.output_dir))
    return trainer


def closing_line(history: list[dict[str, Any]], directory: str) -> str:
    """The reward at the start and at the end, and the logged steps from which nothing could be learned."""
    steps = [each for each in history if "reward" in each]
    flat = sum(each.get("frac_reward_zero_std") == 1 for each in steps)
    reward = (
        f"reward {steps[0]['reward']:.2f} -> {steps[-1]['reward']:.2f}" if steps else "no reward was logged"
    )
    return f"{reward}; all groups flat in {flat} of {len(steps)} logged steps; model saved in {directory}"


def train(config: dict[str, Any], resume_from_checkpoint: str | None) -> GRPOTrainer:
    """Rollouts, then a step, and so on."""
    grpo = arguments(GRPOConfig, config["grpo"])
    set_seed(grpo.seed)
    model, tokenizer = policy(config["model"])
    with arguments(NeMoGymSpec, config["nemo_gym"]) as spec:
        grpo.reward_weights = spec.reward_weights
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


def policy(name: str) -> tuple[Any, Any]:
    """Model and tokenizer; the trainer loads its own for a name."""
    if name != "tiny":
        return name, None
    from tiny_policy import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    return make_model(tokenizer), tokenizer


def read(path: Path, vllm_server_base_url: str | None) -> dict[str, Any]:
    """The file's config, with the server's address in it where one is given."""
    try:
        config: dict[str, Any] = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    parts = {"model": str, "nemo_gym": dict, "grpo": dict}
    for part, kind in parts.items():
        if not isinstance(config, dict) or not isinstance(config.get(part), kind):
            raise ConfigError(
                f"{path} needs {', '.join(parts)}, and {part} is missing or not a {kind.__name__}"
            )
    if unknown := {*config} - {*parts}:
        raise ConfigError(f"{path}: {', '.join(sorted(unknown))} is none of {', '.join(parts)}")
    if vllm_server_base_url:
        config["grpo"]["vllm_server_base_url"] = vllm_server_base_url
    return config


def arguments(cls: type[Any], values: dict[str, Any]) -> Any:
    """The trainer's arguments; one line where they do not fit."""
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{cls.__name__}: {error}") from None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--vllm_server_base_url", help="in place of the config's")
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()
    try:
        main(read(args.config, args.vllm_server_base_url), args.resume_from_checkpoint)
    except (ConfigError, DataError) as error:
        sys.exit(f"train.py: {error}")
