"""One rank of a training on two: writes the rewards' log, what it rolled out, and the stack it used to FOLDER/RANK.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl_support import ENVIRONMENT, ONE_LETTER, arguments, tiny  # noqa: E402

from gymgate.trl import NeMoGymSpec  # noqa: E402


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model, tokenizer, _ = tiny()
    batches: list[int] = []
    servers: Any = None
    with NeMoGymSpec(ENVIRONMENT, data=ONE_LETTER, renderer="qwen3", score_truncated=True) as spec:

        def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            nonlocal servers
            batches.append(len(prompts))
            made = spec.rollout_func(prompts, trainer)
            assert spec._loop is not None
            assert spec._attempts is not None
            (environment,) = spec._loop.call(spec._attempts._stack.status())["environments"].values()
            servers = {name: server["pid"] for name, server in environment["servers"].items()}
            return made

        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(
                **arguments(
                    folder,
                    per_device_train_batch_size=3,
                    num_generations=6,
                    max_completion_length=8,
                    max_steps=2,
                )
            ),
            processing_class=tokenizer,
            train_dataset=spec.train_dataset,
            rollout_func=rollout_func,
            reward_funcs=spec.reward_funcs,
        )
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "reward" in entry]
        told = {"batches": batches, "servers": servers, "log": log, "share": spec.config.share}
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
