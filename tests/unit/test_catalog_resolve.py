"""Overrides that begin with a name that the config does not have."""

from __future__ import annotations

import pytest

from gymgate.gym.inside.resolve import unknown_names

CONFIG = {
    "solver": {
        "responses_api_agents": {
            "simple_agent": {
                "entrypoint": "app.py",
                "model_server": {"type": "responses_api_models", "name": "their_model"},
                "url": "${endpoint}",
                "sandbox_provider": "box",
            }
        }
    },
}
ADDED = {
    "mine": {"resources_servers": {"mine": {"entrypoint": "app.py"}}},
    "their_model": {"responses_api_models": {"openai_model": {"temperature": 0}}},
    "endpoint": {"host": "h"},
    "box": {"docker": {"create": {"network": "none"}}},
    "sovler": {"responses_api_agents": {"simple_agent": {"max_steps": 1}}},
    "nosuch": {"max_steps": 1},
}


@pytest.mark.parametrize(
    ("override", "known"),
    [
        ("solver.responses_api_agents.simple_agent.max_steps", True),
        ("head_server.host", True),
        ("anything", True),
        ("mine.resources_servers.mine.entrypoint", True),
        ("their_model.responses_api_models.openai_model.temperature", True),
        ("endpoint.host", True),
        ("box.docker.create.network", True),
        ("sovler.responses_api_agents.simple_agent.max_steps", False),
        ("nosuch.max_steps", False),
    ],
)
def test_a_name_is_known_or_gets_a_meaning(override: str, known: bool) -> None:
    found = unknown_names({**CONFIG, **ADDED}, {"solver", "head_server"}, [override])
    assert found == ([] if known else [override])
