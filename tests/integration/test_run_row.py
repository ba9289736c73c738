"""`gymgate.run_row` against a real endpoint and real Gym servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import gymgate
from gymgate.core.config import EnvironmentConfig, HTTPEndpoint
from gymgate.stack import run_row as api
from support.episodes import assistant, episode_row, episodes, user
from support.scripted import ScriptedPolicy
from support.stacks import stack_config
from support.upstream import Script, Seen, upstream

pytestmark = [pytest.mark.gym, pytest.mark.warm]

COUNTER = "example_session_state_mgmt"


@pytest.fixture
async def policy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ScriptedPolicy]:
    monkeypatch.setattr(api, "SHARED_LINGER_S", 0.0)  # the stack must not outlive the test
    async with ScriptedPolicy().serving() as policy:
        yield policy


async def test_rows_with_a_url_and_a_key_share_a_stack(policy: ScriptedPolicy) -> None:
    first, second = (row.data for row in gymgate.open_rows(COUNTER)[:2])
    solved, wrong = await asyncio.gather(
        gymgate.run_row(first, COUNTER, base_url=policy.base_url, api_key="one", model="m"),
        gymgate.run_row(second, COUNTER, base_url=policy.base_url, api_key="two", model="m"),
    )
    assert [gymgate.outcome_of(rollout).reward for rollout in (solved, wrong)] == [1.0, 0.0]
    assert policy.keys == {"Bearer one", "Bearer two"}
    assert policy.calls["chat"] == 8


async def test_a_failure_is_raised_and_is_no_reward(policy: ScriptedPolicy) -> None:
    row = gymgate.open_rows(COUNTER)[0].data
    policy.fail = 400
    with pytest.raises(gymgate.PolicyError, match="no capacity today") as raised:
        await gymgate.run_row(row, COUNTER, base_url=policy.base_url, model="m")
    assert raised.value.status_code == 400
    policy.fail = None
    unscorable = {key: value for key, value in row.items() if key != "expected_count"}
    with pytest.raises(gymgate.EnvironmentServerError, match="expected_count"):
        await gymgate.run_row(unscorable, COUNTER, base_url=policy.base_url, model="m")


def saying(say: Any) -> Script:
    async def script(seen: Seen) -> web.Response:
        return web.json_response(say(seen.body))

    return script


async def test_the_simulated_user_is_no_turn_of_the_policy(tmp_path: Path) -> None:
    """Where two agents have the policy's model server, the config says which one is trained."""
    path = str(episodes(tmp_path, "duet_same"))
    row: Any = episode_row()
    name = {"type": "responses_api_agents", "name": "duet_same_assistant"}
    trained = ("+duet_same.environment_servers.duet.agent_server", name)
    async with upstream(saying(assistant())) as policy, upstream(saying(user)) as other:
        judge = HTTPEndpoint(base_url=other.url, dialect="responses", model="m")
        settings: Any = {
            "base_url": policy.url,
            "dialect": "responses",
            "model": "m",
            "judge_policy": judge,
        }
        with pytest.raises(gymgate.ConfigError, match="agent_server"):
            await gymgate.run_row(row, stack_config(EnvironmentConfig(name=path)), **settings)
        assert (policy.seen, other.seen) == ([], [])
        environment = EnvironmentConfig(name=path, overrides=(trained,))
        rollout = await gymgate.run_row(row, stack_config(environment), **settings)
    assert (rollout.reward, len(policy.seen), len(other.seen)) == (1.0, 3, 2)
