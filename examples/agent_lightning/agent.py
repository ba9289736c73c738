"""A NeMo Gym environment as the agent of Agent Lightning 1.0, whose local controller runs each rollout in a process.

    pip install 'agentlightning==1.0.2'    # beside gymgate; Python >= 3.12
    python -m agentlightning.server key=KEY default_proxy.model_name=MODEL
    python -m agentlightning.controller runner_type=local agl_server.key=KEY    # in this directory
    python train.py ...

All rollouts share one stack of this machine. A rollout that fails, or that has no reward, is not trained on.
"""

from __future__ import annotations

import json
import os

from agentlightning.client import AgentLightningAsyncClient

import gymgate

LINGER_S = 1800.0
"""Seconds that the stack waits for the next rollouts, which come after an update of the policy."""


class NeMoGymAgent:
    """Runs one row; `agentlightning.local.agent_class=agent:NeMoGymAgent` names it.

    Its settings are environment variables, from `agentlightning.local.env_map`: NEMO_GYM_ENVIRONMENT (a name),
    NEMO_GYM_ROW (the row as JSON, at most 128 KiB: Linux's limit for a variable), and perhaps NEMO_GYM_LINGER_S.
    """

    def __init__(self) -> None:
        self.events_url = os.environ["AGL_EVENT_URL"]  # .../api/rollouts/ID/attempt/ATTEMPT/events
        self.key = os.environ.get("AGL_KEY") or None
        self.config = gymgate.StackConfig(
            environments=(os.environ["NEMO_GYM_ENVIRONMENT"],),
            share="machine",
            linger_s=float(os.environ.get("NEMO_GYM_LINGER_S", LINGER_S)),
        )

    async def run(self) -> None:
        async with AgentLightningAsyncClient(key=self.key, timeout=60.0) as server:
            await self.withhold_calls(server)
            try:
                reward = await self.reward()
            except BaseException:
                await self.withhold_calls(
                    server
                )  # the controller may have named the attempt after the first time
                raise
            event = {"event_type": "reward", "data": {"value": reward}}
            (await server.post(self.events_url, json=event)).raise_for_status()

    async def reward(self) -> float:
        """Run the row. Raises the rollout's error, and `RuntimeError` where it has no reward to train on."""
        rollout = await gymgate.run_row(
            json.loads(os.environ["NEMO_GYM_ROW"]),
            self.config,
            base_url=os.environ["AGL_OPENAI_BASE_URL"],
            api_key=self.key,
            max_retries=60,  # calls are refused with Retry-After while the policy is updated
        )
        outcome = gymgate.outcome_of(rollout)
        if outcome.reward is None:
            raise RuntimeError(f"the rollout has no reward to train on: {outcome.reason}")
        return outcome.reward

    async def withhold_calls(self, server: AgentLightningAsyncClient) -> None:
        """Keep this rollout's model calls out of the training until it has succeeded.

        Agent Lightning trains on the recorded calls of a rollout's last attempt, with `reward_fillna_value` (0.0) where
        the attempt failed. So this names an attempt without calls; on success the controller names the real one.
        """
        status = {"last_attempt_id": "none-succeeded"}
        rollout_url = self.events_url.partition("/attempt/")[0]
        (await server.patch(rollout_url, json={"status": status})).raise_for_status()
