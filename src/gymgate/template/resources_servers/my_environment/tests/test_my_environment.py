"""Answers and their rewards, on the environment's real servers; the policy is a function. No model is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

gymgate = pytest.importorskip(
    "gymgate"
)  # NeMo Gym's interpreter, where `gym env test` runs, does not have it
CONFIG = str(Path(__file__).parents[1] / "configs" / "my_environment.yaml")
Policy = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def policy(*said: dict[str, Any]) -> Policy:
    """Return a policy that gives these messages, one after another."""
    messages = iter(said)

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": None, **next(messages)}
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "test", "choices": [choice]}

    return answer


def call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


async def run_first_row(*policies: Policy) -> list[Any]:
    row = gymgate.open_rows(CONFIG)[0]
    async with gymgate.acquire(gymgate.StackConfig(environments=(CONFIG,))) as stack:
        return [await stack.run(row.data, policy=policy) for policy in policies]


def test_rewards() -> None:
    answers = ["42", "There are 12 and 30:\n42.0", "41", "not 42"]
    rollouts = asyncio.run(run_first_row(*(policy({"content": text}) for text in answers)))
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0, 0.0, 0.0]


def test_the_tool() -> None:
    asking = policy(call("count_items", '{"item": "apples"}'), {"content": "12"})
    [rollout] = asyncio.run(run_first_row(asking))
    assert rollout.metrics["tool_calls"] == 1
    assert rollout.result is not None
    [output] = [
        item for item in rollout.result["response"]["output"] if item["type"] == "function_call_output"
    ]
    assert '"count":12' in output["output"].replace(" ", "")
