"""The reward of each recorded answer, without servers: for `gym env test`, whose interpreter has NeMo Gym and not gymgate."""

import asyncio
import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest

pytest.importorskip("nemo_gym")

from nemo_gym.server_utils import ServerClient
from resources_servers.my_environment.app import (
    MyEnvironment,
    MyEnvironmentConfig,
    MyEnvironmentVerifyRequest,
)

DATA = Path(__file__).parents[1] / "data"
RECORDED = [json.loads(line) for line in (DATA / "example_rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("rollout", RECORDED)
def test_the_reward_is_the_recorded_one(rollout: dict) -> None:
    config = MyEnvironmentConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="my_environment")
    server = MyEnvironment(config=config, server_client=MagicMock(spec=ServerClient))
    answer = asyncio.run(server.verify(MyEnvironmentVerifyRequest.model_validate(rollout)))
    assert answer.reward == rollout["reward"]
