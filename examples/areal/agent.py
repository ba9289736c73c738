"""A NeMo Gym environment as an agent workflow of AReaL 1.0.

    pip install 'areal==1.0.4' 'litellm<1.82'    # beside gymgate; AReaL imports a module that later ones moved
    python train.py ENVIRONMENT ROWS.jsonl --config grpo.yaml     # in this directory

AReaL gives each rollout a base URL and a key: as arguments of `run`, or as environment variables where it runs agents in
processes of their own (`rollout.agent.mode=subproc`). All rollouts share one stack of this machine.
"""

from __future__ import annotations

import json
import os
from typing import Any

import gymgate


class NeMoGymAgent:
    """Runs one row and returns its reward. AReaL rejects a rollout whose agent raises; it does not train on it.

    `environment` is a name. `max_tokens` bounds one answer of the policy, because AReaL takes 512 unless a call says
    otherwise. The stack waits `linger_s` seconds for the next rollouts, which come after an update of the policy.
    """

    def __init__(self, environment: str, max_tokens: int, linger_s: float = 1800.0) -> None:
        self.config = gymgate.StackConfig(environments=(environment,), share="machine", linger_s=linger_s)
        self.max_tokens = max_tokens

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Run the row in `data["nemo_gym_row"]`. Raises the rollout's error, and `RuntimeError` if it has no reward."""
        rollout = await gymgate.run_row(
            json.loads(data["nemo_gym_row"]),
            self.config,
            base_url=extra_kwargs.get("base_url") or os.environ["OPENAI_BASE_URL"],
            api_key=extra_kwargs.get("api_key") or os.environ["OPENAI_API_KEY"],
            model="default",  # AReaL refuses calls without a name, and ignores it
            sampling={"max_tokens": self.max_tokens},
        )
        outcome = gymgate.outcome_of(rollout)
        if outcome.reward is None:
            raise RuntimeError(f"the rollout has no reward to train on: {outcome.reason}")
        return outcome.reward
