"""What a rollout is whose judge failed, whatever its agent answers: a scripted agent, a real gateway."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gymgate.core.config import RolloutLimits
from gymgate.gateway.route import Route
from gymgate.gateway.server import Gateway
from gymgate.stack.daemon.rollout import RolloutRun, new_client
from support.upstream import Seen, chat_answer, upstream

SCORED = {"response": {"output": []}, "reward": 0.0}
OVERFLOW = "This model's maximum context length is 4096 tokens"


async def rollout(
    asks: list[str],
    *,
    judge: int = 200,
    policy: int = 200,
    status: int = 200,
    answer: Mapping[str, Any] = SCORED,
) -> dict[str, Any]:
    """Status, reward and error of a rollout whose agent asks these model servers and then answers."""

    async def endpoint(seen: Seen) -> web.Response:
        code = judge if seen.body["messages"][0]["content"] == "judge" else policy
        body = chat_answer() if code == 200 else {"error": {"message": OVERFLOW}}
        return web.json_response(body, status=code)

    async with upstream(endpoint) as models, Gateway() as gateway, aiohttp.ClientSession() as http:
        route = gateway.open(
            models.endpoint(), judges={"judge": models.endpoint()}, limits=RolloutLimits(max_calls=2)
        )

        async def ask(name: str) -> None:
            url = (
                f"http://127.0.0.1:{await gateway.port_for(name)}/ng-rollout/{route.key}/v1/chat/completions"
            )
            body = {"model": "m", "messages": [{"role": "user", "content": name}]}
            async with http.post(url, json=body) as response:
                await response.read()

        async def agent(seen: Seen) -> web.Response:
            for name in asks:
                await ask(name)
            return web.json_response(answer, status=status)

        return await outcome_of(agent, route)


async def outcome_of(agent: Any, route: Route) -> dict[str, Any]:
    async with upstream(agent) as serving, new_client() as client:
        environment: Any = SimpleNamespace(
            name="e", agents={"a": "simple_agent"}, plan=SimpleNamespace(packaged_graders={})
        )
        running = RolloutRun(environment, "a", b"{}", route, timeout_s=60)
        await running.post(client, f"{serving.url}/run")
        return running.fields


def failed_for(outcome: Mapping[str, Any]) -> str:
    assert outcome["status"] == "failed"
    assert "reward" not in outcome
    assert outcome["error"]["kind"] == "policy"
    return str(outcome["error"]["message"])


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("judge", [400, 500])
@pytest.mark.parametrize(
    ("asks", "policy"),
    [
        (["policy_model", "judge"], 200),
        (["policy_model", "judge"], 400),
        (["policy_model"] * 3 + ["judge"], 200),
    ],
    ids=["scored", "the-policy-overflowed", "max-calls"],
)
async def test_a_judges_failure_decides(asks: list[str], policy: int, judge: int, status: int) -> None:
    outcome = await rollout(asks, judge=judge, policy=policy, status=status)
    assert "model server 'judge'" in failed_for(outcome)
    assert outcome["error"]["status_code"] == judge


async def test_an_answered_judge_decides_nothing() -> None:
    assert (await rollout(["policy_model", "judge"]))["status"] == "completed"
    assert (await rollout(["policy_model", "judge"], policy=400))["status"] == "truncated"
    outcome = await rollout(["policy_model", "judge"], policy=500)
    assert "model server 'judge'" not in failed_for(outcome)
    outcome = await rollout(["policy_model", "judge"], status=500)
    assert (outcome["status"], outcome["error"]["kind"]) == ("failed", "environment")


@pytest.mark.parametrize("field", ["failure_kind", "_ng_failure_class"])
async def test_a_failure_that_only_nemo_gym_saw(field: str) -> None:
    """Its judge is not behind the gateway, or gave it an empty answer."""
    answer = {**SCORED, field: "judge_failed", "failure_reason": "ClientResponseError: 401"}
    outcome = await rollout(["policy_model"], answer=answer)
    assert str(failed_for(outcome)).endswith(": ClientResponseError: 401")
    assert outcome["error"]["retryable"]


@pytest.mark.parametrize(
    ("seen", "given"),
    [
        ({}, 0.0),
        ({"response": {"output": [], "status": "incomplete"}}, 0.0),
        ({"mask_sample": True}, None),
        ({"failure_kind": "judge_failed"}, None),
    ],
)
async def test_a_zero_that_stands_for_a_failed_judge_is_shown_unless_it_says_so(
    seen: dict[str, Any], given: float | None
) -> None:
    outcome = await rollout(["policy_model", "judge"], judge=500, answer={**SCORED, **seen})
    assert outcome["error"]["reward_given"] == given
