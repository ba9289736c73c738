"""Train on a NeMo Gym environment with Agent Lightning 1.0 and verl, which need a GPU.

    python train.py +environment=workplace_assistant +rows=train.jsonl agentlightning.agl_key=KEY \
        actor_rollout_ref.model.path=MODEL actor_rollout_ref.rollout.n=8 ...

`agent.py` says what has to run beside it. Everything else is Agent Lightning's and verl's own configuration.
"""

from __future__ import annotations

import json
from typing import Any

import hydra
from omegaconf import DictConfig, open_dict

import gymgate


def read_rows(environment: str, source: str = "example") -> list[dict[str, Any]]:
    """Return rows as Agent Lightning takes them. As text, a row keeps its fields: a table would fill in missing ones."""
    return [
        {"nemo_gym_row": json.dumps(row.data), "data_id": str(number)}
        for number, row in enumerate(gymgate.open_rows(environment, source))
    ]


def env_map(environment: str) -> dict[str, str]:
    """Return the variables of an agent's process: `input.NAME` is a field of the row, anything else is itself."""
    return {"NEMO_GYM_ENVIRONMENT": environment, "NEMO_GYM_ROW": "input.nemo_gym_row"}


@hydra.main(version_base=None, config_path="pkg://agentlightning.verl", config_name="config")
def main(config: DictConfig) -> None:
    from agentlightning.verl.entrypoint import run_ppo

    with open_dict(config):
        environment = config.pop("environment")
        rows = read_rows(environment, config.pop("rows", "example"))
    config.agentlightning.local.agent_class = "agent:NeMoGymAgent"
    config.agentlightning.local.env_map = env_map(environment)
    run_ppo(config, rows, rows)


if __name__ == "__main__":
    main()
