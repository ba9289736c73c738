"""Real stacks of the other release, of a user's own environment, and of configs that lack something."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gymgate
from gymgate.core.config import CallableEndpoint, EnvironmentConfig, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, NeedMissingError
from gymgate.stack import acquire, acquire_sync
from support.faulty import faulty
from support.stacks import ROW, SIMPLE, call_then_answer, runtime, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm]

JUDGEMENT = {
    "id": "c",
    "object": "chat.completion",
    "created": 0,
    "model": "judge",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
}


@pytest.fixture(scope="module")
def older() -> Iterator[StackConfig]:
    """Of a stack of 0.6.0 that is up, whose agent gets the key in the row's metadata."""
    config = stack_config(EnvironmentConfig(name=SIMPLE, routing="metadata"), version="0.6.0")
    with acquire_sync(config):
        yield config


async def test_the_older_release_routes_by_metadata(older: StackConfig) -> None:
    """Our entry is taken out of what the policy, the record and the result show."""
    row = {"responses_create_params": {**ROW["responses_create_params"], "metadata": {"mine": "kept"}}}
    seen: list[Any] = []

    def policy(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(body.get("metadata"))
        return call_then_answer(body)

    async with acquire(older) as stack:
        endpoint = stack.register("spy", policy, dialect="responses")
        rollouts = await asyncio.gather(*(stack.run(row, policy=endpoint) for _ in range(8)))
    assert [rollout.reward for rollout in rollouts] == [1.0] * 8
    assert seen == [{"mine": "kept"}] * 16
    assert all("gymgate_route" not in rollout.model_dump_json() for rollout in rollouts)
    assert rollouts[0].result is not None
    assert rollouts[0].result["responses_create_params"]["metadata"] == {"mine": "kept"}


async def test_the_older_release_never_calls_after_the_end(older: StackConfig) -> None:
    """Its agent goes on after a rollout is over; the key is gone by then."""
    calls = 0

    async def policy(body: dict[str, Any]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.4)
        return call_then_answer({**body, "input": []})

    async with acquire(older) as stack:
        endpoint = stack.register("endless", policy, dialect="responses")
        rollout = await stack.run(ROW, policy=endpoint, limits=RolloutLimits(timeout_s=1.0))
        assert rollout.error is not None
        assert rollout.error.kind == "timeout"
        made = calls
        await asyncio.sleep(1.0)
        assert calls == made


async def test_an_environment_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a path relative to the working directory, with an override; servers are found around the config."""
    faulty(tmp_path)
    monkeypatch.chdir(tmp_path)
    environment = EnvironmentConfig(name="./resources_servers/faulty/configs/faulty.yaml")
    async with acquire(stack_config(environment)) as stack:
        endpoint = stack.register("scripted", call_then_answer, dialect="responses")
        assert (await stack.run(ROW, policy=endpoint)).reward == 0.5


@pytest.mark.parametrize("judged", ["endpoint", "policy", None])
async def test_judges_have_endpoints_of_their_own(tmp_path: Path, judged: str | None) -> None:
    """Their keys need not be set. A judge without an endpoint is a failure, not Gym's masked 0."""
    models = {"endpoint": {"judge_model": CallableEndpoint(name="judge")}, "policy": {"*": "policy"}}
    config = stack_config(faulty(tmp_path, fault="judge"), models=models.get(judged or "", {}))
    async with acquire(config) as stack:
        stack.register("judge", lambda body: JUDGEMENT)
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        rollout = await stack.run(ROW, policy=policy)
    if judged is None:
        assert rollout.error is not None
        assert rollout.error.kind == "policy"
        assert "'judge_model'" in rollout.error.message
        return
    assert rollout.reward == 1.0
    assert [call.model_server for call in rollout.calls] == ["policy_model", "policy_model", "judge_model"]
    assert len(rollout.policy_calls) == 2
    assert rollout.timing.judge_s > 0


async def test_a_policy_that_is_its_own_judge_is_recorded_apart() -> None:
    """The packaged config of equivalence_llm_judge names the policy as judge; an endpoint may be named in its place."""
    environment = "equivalence_llm_judge"
    row = next(iter(gymgate.open_rows(environment, runtime=runtime()))).data
    seen: list[str] = []

    def answering(name: str, text: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def answer(body: dict[str, Any]) -> dict[str, Any]:
            seen.append(name)
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return {**JUDGEMENT, "choices": [choice]}

        return answer

    async with acquire(stack_config(environment)) as stack:
        policy = stack.register("policy", answering("policy", "\\boxed{darwin} [[A=B]]"))
        judge = stack.register("judge", answering("judge", "[[A=B]]"))
        alone = await stack.run(row, policy=policy)
        judged = await stack.run(row, policy=policy, judge_policy=judge)
    assert [call.model_server for call in alone.calls][:2] == ["policy_model", "policy_model_as_judge"]
    assert len(alone.policy_calls) == len(judged.policy_calls) == 1
    assert (alone.reward, judged.reward) == (1.0, 1.0)
    judgements = len(judged.calls) - 1
    assert seen[-1 - judgements :] == ["policy", *["judge"] * judgements]


@pytest.mark.parametrize(
    ("environment", "error", "words"),
    [
        (EnvironmentConfig(name="workplace_asistant"), ConfigError, "workplace_assistant"),
        (EnvironmentConfig(name=SIMPLE, agent="nobody"), ConfigError, f"'nobody'.*{SIMPLE}_simple_agent"),
        (EnvironmentConfig(name=SIMPLE, config="nothing"), ConfigError, SIMPLE),
        (
            EnvironmentConfig(
                name=SIMPLE, overrides=((f"{SIMPLE}.resources_servers.{SIMPLE}.x", "${tavily_api_key}"),)
            ),
            NeedMissingError,
            "tavily_api_key",
        ),
    ],
    ids=["environment", "agent", "config", "key"],
)
async def test_what_a_config_lacks_is_said(
    environment: EnvironmentConfig, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        async with acquire(stack_config(environment)):
            pass
