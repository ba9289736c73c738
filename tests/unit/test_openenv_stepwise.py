"""Which environments a client can play step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymgate.core.errors import ConfigError
from gymgate.gym.catalog import EnvConfig, Environment
from gymgate.gym.inside.resolve import AGENTS, ENVIRONMENT_SERVERS, ServerInstance
from gymgate.integrations.openenv.stepwise import stepwise_environment


def environment(*calls: str) -> tuple[Environment, EnvConfig]:
    """One with two agents, and an environment server that calls these."""
    policy = {"type": "responses_api_models", "name": "policy_model"}
    block: dict[str, Any] = {"model_server": policy, "resources_server": {"name": "maths"}}
    agents = [ServerInstance(name, AGENTS, "simple_agent", block) for name in ("assistant", "user")]
    references = {f"{name}_agent": {"type": AGENTS, "name": name} for name in calls}
    owner = ServerInstance("owner", ENVIRONMENT_SERVERS, "turn", references)
    config = EnvConfig("c", Path("c.yaml"), instances=(*agents, owner))
    return Environment("e", "config", Path("e"), configs=(config,)), config


def test_an_episode_of_one_agent() -> None:
    assert stepwise_environment(*environment("assistant")).agent == "assistant"


def test_an_episode_in_which_several_agents_talk_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"owner.*assistant, user"):
        stepwise_environment(*environment("assistant", "user"))
