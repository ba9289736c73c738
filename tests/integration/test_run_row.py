"""`gymgate.run_row` against a real endpoint and real Gym servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import gymgate
from gymgate.stack import run_row as api
from support.scripted import ScriptedPolicy

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
