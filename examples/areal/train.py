"""Train on a NeMo Gym environment with AReaL 1.0, which needs GPUs.

    python train.py ENVIRONMENT ROWS.jsonl --config grpo.yaml

`grpo.yaml` is a configuration of AReaL's own. ROWS may be `example`, the environment's packaged rows.
"""

from __future__ import annotations

import json
import sys

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from datasets import Dataset

import gymgate


def read_rows(environment: str, source: str) -> Dataset:
    """Return rows as AReaL takes them. As text, a row keeps its fields: a table would fill in missing ones."""
    rows = gymgate.open_rows(environment, source)
    return Dataset.from_list([{"nemo_gym_row": json.dumps(row.data)} for row in rows])


def main(environment: str, source: str, *arguments: str) -> None:
    config, _ = load_expr_config([*arguments], GRPOConfig)
    settings = {"environment": environment, "max_tokens": config.gconfig.max_new_tokens}
    with PPOTrainer(config, train_dataset=read_rows(environment, source)) as trainer:
        trainer.train(workflow="agent.NeMoGymAgent", workflow_kwargs=settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
