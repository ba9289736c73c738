"""Rollouts on a real stack: what comes back for a good row, a bad one, and a policy that fails."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import HTTPEndpoint, ReplayEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, DataError
from gymgate.gym.catalog import Catalog
from gymgate.gym.runtime import ensure_runtime
from gymgate.stack import Stack
from support.faulty import faulty
from support.stacks import ROW, SESSIONS, SIMPLE, answer, call_then_answer, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm]

AGENT = f"{SIMPLE}_simple_agent"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> StackConfig:
    broken = faulty(tmp_path_factory.mktemp("faulty"), fault="verify")
    return stack_config(SIMPLE, SESSIONS, broken)


async def test_a_rollout_is_scored_and_recorded(stack: Stack) -> None:
    policy = stack.register("scripted", call_then_answer, dialect="responses")
    rollout = await stack.run(ROW, policy=policy, environment=SIMPLE)
    assert (rollout.status, rollout.reward, rollout.error) == ("completed", 1.0, None)
    assert (rollout.environment, rollout.agent) == (SIMPLE, AGENT)
    assert [call.status_code for call in rollout.policy_calls] == [200, 200]
    assert rollout.timing.total_s >= rollout.timing.model_s > 0


async def test_the_key_is_nowhere(stack: Stack) -> None:
    """What the agent was asked carries a key in its URL and its body; results, records and the policy's requests do not."""
    seen: list[str] = []
    policy = stack.register(
        "spy", lambda body: seen.append(json.dumps(body)) or call_then_answer(body), dialect="responses"
    )
    rollout = await stack.run(ROW, policy=policy, environment=SIMPLE, rollout_id="public-1")
    assert "ng_trajectory" not in (rollout.result or {})
    found = rollout.model_dump_json() + "".join(seen)
    assert not re.search(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", found)
    assert "gymgate_route" not in found


async def test_the_result_keeps_the_rows_fields(stack: Stack) -> None:
    """Unknown fields go to `/verify` and come back; they are no metrics."""
    policy = stack.register("scripted", call_then_answer, dialect="responses")
    rollout = await stack.run(
        {**ROW, "difficulty": 3, "_ng_attempt_index": 2}, policy=policy, environment=SIMPLE
    )
    assert rollout.reward == 1.0
    assert rollout.metrics == {}


async def test_many_at_once_do_not_mix(stack: Stack) -> None:
    """Each rollout's calls reach its own policy and no other."""

    async def one(number: int) -> None:
        def policy(body: dict[str, Any]) -> dict[str, Any]:
            made = call_then_answer(body)
            made["output"][0].get("content", [{}])[0]["text"] = f"mine is {number}"
            return made

        endpoint = stack.register(f"policy-{number}", policy, dialect="responses")
        rollout = await stack.run(ROW, policy=endpoint, environment=SIMPLE)
        assert rollout.reward == 1.0
        assert f"mine is {number}" in str((rollout.result or {})["response"]["output"][-1])

    await asyncio.gather(*(one(number) for number in range(24)))


@pytest.mark.parametrize(
    ("row", "named", "error", "words"),
    [
        ({"question": "?"}, {}, DataError, "responses_create_params"),
        ({"responses_create_params": {}}, {}, DataError, "no input"),
        (ROW, {}, ConfigError, "environment"),
        (ROW, {"environment": "mcqa"}, ConfigError, f"'mcqa'.*{SIMPLE}"),
        ({**ROW, "agent_ref": {"name": "mcqa_simple_agent"}}, {}, ConfigError, f"mcqa_simple_agent.*{AGENT}"),
        (ROW, {"agent": AGENT, "environment": SESSIONS}, ConfigError, f"{AGENT}.*{SESSIONS}"),
        ({**ROW, "x": object()}, {"environment": SIMPLE}, DataError, "JSON"),
    ],
)
async def test_what_the_caller_got_wrong_is_raised(
    stack: Stack, row: dict[str, Any], named: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await stack.run(row, policy=HTTPEndpoint(base_url="http://127.0.0.1:9/v1"), **named)


async def test_the_row_names_its_agent(stack: Stack) -> None:
    policy = stack.register("scripted", call_then_answer, dialect="responses")
    rollout = await stack.run({**ROW, "agent_ref": {"name": AGENT}}, policy=policy)
    assert rollout.agent == AGENT


async def test_a_rejected_row_is_a_data_failure(stack: Stack) -> None:
    row = {"responses_create_params": {**ROW["responses_create_params"], "colour": "red"}}
    rollout = await stack.run(row, policy=call_then_answer, environment=SIMPLE)
    assert rollout.status == "failed"
    assert rollout.reward is None
    assert rollout.error is not None
    assert (rollout.error.kind, rollout.error.type) == ("data", "DataError")
    assert "colour" in rollout.error.message
    assert "\n" not in rollout.error.message


async def test_an_unreachable_policy_is_a_policy_failure(stack: Stack) -> None:
    endpoint = HTTPEndpoint(base_url="http://127.0.0.1:9/v1", dialect="responses", max_retries=0)
    rollout = await stack.run(ROW, policy=endpoint, environment=SIMPLE)
    assert rollout.status == "failed"
    assert rollout.error is not None
    assert rollout.error.kind == "policy"


async def test_a_policy_that_raises_is_a_policy_failure(stack: Stack) -> None:
    def policy(body: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("out of memory")

    rollout = await stack.run(
        ROW, policy=stack.register("bad", policy, dialect="responses"), environment=SIMPLE
    )
    assert rollout.error is not None
    assert rollout.error.kind == "policy"
    assert "out of memory" in rollout.error.message


async def test_an_environments_own_error_names_the_server(stack: Stack) -> None:
    name = stack.config.environments[2].name
    policy = stack.register("scripted", call_then_answer, dialect="responses")
    rollout = await stack.run(ROW, policy=policy, environment=name)
    assert rollout.error is not None
    assert (rollout.error.kind, rollout.error.status_code) == ("environment", 500)
    assert "verifiable" in rollout.error.message
    assert "\n" not in rollout.error.message


async def test_a_deadline_ends_the_rollout(stack: Stack) -> None:
    """The hanging policy call is cancelled with it."""
    ended = asyncio.Event()

    async def policy(body: dict[str, Any]) -> dict[str, Any]:
        try:
            return await asyncio.Event().wait() or {}
        finally:
            ended.set()

    endpoint = stack.register("hangs", policy, dialect="responses")
    rollout = await stack.run(ROW, policy=endpoint, environment=SIMPLE, limits=RolloutLimits(timeout_s=0.5))
    assert rollout.error is not None
    assert rollout.error.kind == "timeout"
    assert "the policy" in rollout.error.message
    await asyncio.wait_for(ended.wait(), 5)
    assert (await stack.status())["rollouts"] == 0


async def test_cancelling_ends_the_rollout_and_leaves_others(stack: Stack) -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def policy(body: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        try:
            return await asyncio.Event().wait() or {}
        finally:
            ended.set()

    endpoint = stack.register("hangs", policy, dialect="responses")
    task = asyncio.create_task(stack.run(ROW, policy=endpoint, environment=SIMPLE))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 5)
    other = stack.register("scripted", call_then_answer, dialect="responses")
    assert (await stack.run(ROW, policy=other, environment=SIMPLE)).reward == 1.0


async def test_a_limit_on_calls_truncates(stack: Stack) -> None:
    policy = stack.register("calls", lambda body: answer(call="get_weather"), dialect="responses")
    rollout = await stack.run(ROW, policy=policy, environment=SIMPLE, limits=RolloutLimits(max_calls=3))
    assert rollout.status == "truncated"
    assert len([call for call in rollout.policy_calls if call.status_code == 200]) == 3


async def test_recorded_rewards_come_back(stack: Stack) -> None:
    """NeMo Gym's own example rollouts, replayed on its servers: the row is the one with the recording's words."""
    runtime = ensure_runtime(stack.config.runtime)
    for name in (SIMPLE, SESSIONS):
        environment = Catalog(runtime.site, runtime.version).find(name)
        recordings = environment.recordings()[0].path
        rows = {words(row): row for row in read(environment.data_file().path)}
        for index, recorded in enumerate(read(recordings)):
            policy = ReplayEndpoint(rollouts=(str(recordings),), index=index)
            rollout = await stack.run(rows[words(recorded)], policy=policy, environment=name)
            assert rollout.error is None
            assert rollout.reward == recorded["reward"]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def words(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(message["content"] for message in row["responses_create_params"]["input"])


async def test_keys_are_not_in_logs(stack: Stack) -> None:
    """Gym logs the URL of a failed model call."""
    endpoint = HTTPEndpoint(base_url="http://127.0.0.1:9/v1", dialect="responses", max_retries=0)
    await stack.run(ROW, policy=endpoint, environment=SIMPLE)
    directory = Path((await stack.status())["directory"])
    logs = "".join(path.read_text() for path in sorted(directory.rglob("*.log")))  # noqa: ASYNC240
    assert "/ng-rollout/<key>/v1/responses" in logs
    assert not re.search(r"\b[0-9a-f]{32}\b", logs)
