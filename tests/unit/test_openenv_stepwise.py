"""Which environments a client can play step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gymgate.core.errors import ConfigError
from gymgate.core.http_client import Response
from gymgate.gym.catalog import EnvConfig, Environment
from gymgate.gym.inside.resolve import AGENTS, ENVIRONMENT_SERVERS, ServerInstance
from gymgate.integrations.openenv.episode import GymnasiumEpisode
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


async def test_an_answer_of_another_form_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"responses_create_params": {"input": "hi"}}
    episode = GymnasiumEpisode("http://127.0.0.1:1", "own", row, 5.0)
    answers = [b'{"info": {"tool_outputs": 5}}', b'{"info": {"tool_outputs": ["x", {"output": "y"}]}}']

    async def send(*_: Any, **__: Any) -> Response:
        return Response(200, {"set-cookie": "a(b=1"}, answers.pop(0))

    monkeypatch.setattr(episode._http, "send", send)
    assert (await episode.say("a")).result is None
    assert (await episode.say("b")).result == "y"
    await episode.close()
