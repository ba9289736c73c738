"""An answer that is only reasoning, on real servers: it is scored as such, also in a training, and the agent says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from gymgate import Stack, open_rows
from gymgate.rollouts.outcome import outcome_of
from gymgate.stack import acquire
from gymgate.tokens import TokenPolicy
from gymgate.tokens.engines import CallableEngine, Sample
from support.conversations import renderer, tokenizer
from support.stacks import ROW, SIMPLE, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.asyncio(loop_scope="module")]

PAYS_MESSAGES = "single_step_tool_use_with_argument_comparison"
"""Rows whose expected action is a message are paid for any message."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def stack() -> AsyncIterator[Stack]:
    async with acquire(stack_config(PAYS_MESSAGES)) as stack:
        yield stack


def thinks(body: dict[str, Any], finish_reason: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": None, "reasoning_content": "The user asks me to"}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}


@pytest.mark.parametrize(("finish_reason", "status"), [("stop", "completed"), ("length", "truncated")])
async def test_it_is_not_paid_as_a_message(stack: Stack, finish_reason: str, status: str) -> None:
    rollouts = [
        await stack.run(row.data, policy=lambda body: thinks(body, finish_reason))
        for row in open_rows(PAYS_MESSAGES)
    ]
    assert [(rollout.reward, rollout.status) for rollout in rollouts] == [(0.0, status)] * 5


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_training_pays_nothing_for_it(stack: Stack, is_cut: bool) -> None:
    """Sampled by ids, with the renderer of a model that thinks; an answer that was cut is left out by default."""
    said = "<think>The user asks" if is_cut else "<think>The user asks</think><|im_end|>"
    ids = tokenizer().encode(said, add_special_tokens=False)

    def sample(prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        return Sample(ids, [-0.5] * len(ids), "length" if is_cut else "stop")

    policy = TokenPolicy(CallableEngine(sample), renderer("qwen3"))
    for row in open_rows(PAYS_MESSAGES):
        conversation = policy.conversation()
        outcome = outcome_of(await stack.run(row.data, policy=conversation))
        assert (outcome.reward, outcome.training_reward) == (0.0, None if is_cut else 0.0)
        assert [segment.completion_ids for segment in conversation.segments] == [ids]


async def test_its_agent_says_so() -> None:
    """And the rollout counts: no limit ended it."""
    async with acquire(stack_config(SIMPLE)) as stack:
        rollout = await stack.run(ROW, policy=thinks)
    assert rollout.result is not None
    response = rollout.result["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    assert response["status"] == "incomplete"
    assert response["metadata"]["ng_termination_reason"] == "incomplete_reasoning"
    assert (rollout.status, rollout.reward) == ("completed", 0.0)


async def test_an_agent_of_0_6_asks_again() -> None:
    """As it does behind its release's own model server."""
    asked: list[dict[str, Any]] = []

    def policy(body: dict[str, Any]) -> Any:
        asked.append(body)
        return thinks(body) if len(asked) < 3 else "cold"

    async with acquire(stack_config(SIMPLE, version="0.6.0")) as stack:
        rollout = await stack.run(ROW, policy=policy)
    assert rollout.result is not None
    kinds = [item["type"] for item in rollout.result["response"]["output"]]
    assert (kinds, rollout.status) == (["reasoning", "reasoning", "message"], "completed")
    assert [len(body["messages"]) for body in asked] == [1, 2, 3]
