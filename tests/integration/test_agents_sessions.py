"""State that a resources server keeps for a rollout: all write, then all read, and each reads only what it wrote."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig
from gymgate.core.errors import StackStartError
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire
from support.agents import STAMP, stamp_of
from support.faulty import faulty
from support.stacks import ROW, SIMPLE, call_then_answer, server_pid, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(300)]

COUNTER, OFFICE = "example_session_state_mgmt", "workplace_assistant"
ROLLOUTS = 32
CREATE, SEARCH = "calendar_create_event", "calendar_search_events"
ADD, READ = "increment_counter", "get_counter_value"


def tool(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": "",
        "parameters": {"type": "object"},
        "strict": False,
    }


class Writer:
    """Writes with its first tool, waits until all have written, then reads with its second."""

    def __init__(
        self, number: int, calls: list[tuple[str, dict[str, Any]]], written: asyncio.Barrier
    ) -> None:
        self.number = number
        self._calls = calls
        self._written = written
        self._ids = itertools.count(1)

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        done = sum(item["role"] == "tool" for item in request["messages"])
        if done == 1:
            await self._written.wait()
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if done < len(self._calls):
            name, arguments = self._calls[done]
            function = {"name": name, "arguments": json.dumps(arguments)}
            message["tool_calls"] = [
                {"id": f"call-{next(self._ids)}", "type": "function", "function": function}
            ]
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return {"id": "c", "object": "chat.completion", "created": 0, "model": "writer", "choices": [choice]}


def counting(number: int, written: asyncio.Barrier) -> tuple[str, dict[str, Any], Writer]:
    params = {"input": [{"role": "user", "content": "count"}], "tools": [tool(ADD), tool(READ)]}
    row = {"responses_create_params": params, "initial_count": 1000 * number, "expected_count": 1001 * number}
    return COUNTER, row, Writer(number, [(ADD, {"count": number}), (READ, {})], written)


def planning(number: int, written: asyncio.Barrier) -> tuple[str, dict[str, Any], Writer]:
    event = {
        "event_name": stamp_of(number),
        "participant_email": "a@example.com",
        "event_start": "2023-12-01 10:00:00",
        "duration": "30",
    }
    params = {"input": [{"role": "user", "content": "plan"}], "tools": [tool(CREATE), tool(SEARCH)]}
    truth = [{"name": CREATE, "arguments": json.dumps(event)}]
    row = {"responses_create_params": params, "ground_truth": truth, "id": number, "category": "c"}
    row["environment_name"] = "office"
    return OFFICE, row, Writer(number, [(CREATE, event), (SEARCH, {"query": "stamp-"})], written)


def outputs(rollout: Rollout) -> list[str]:
    assert rollout.result is not None, rollout.error
    output = rollout.result["response"]["output"]
    return [item["output"] for item in output if item["type"] == "function_call_output"]


async def test_sessions_are_never_shared() -> None:
    written = asyncio.Barrier(2 * ROLLOUTS)
    jobs = [make(n, written) for n in range(1, ROLLOUTS + 1) for make in (counting, planning)]
    async with acquire(stack_config(COUNTER, OFFICE)) as stack:
        rollouts = await asyncio.gather(
            *(stack.run(row, policy=policy, environment=place) for place, row, policy in jobs)
        )
    for rollout, (place, _, policy) in zip(rollouts, jobs, strict=True):
        wrote, read = outputs(rollout)
        assert rollout.reward == 1.0, (place, wrote, read)
        if place == COUNTER:
            assert json.loads(read)["count"] == 1001 * policy.number
        else:
            assert {int(number) for number in STAMP.findall(read)} == {policy.number}


async def score(stack: Stack, environment: str) -> float | None:
    policy = stack.register("scripted", call_then_answer, dialect="responses")
    rollout = await stack.run(ROW, policy=policy, environment=environment)
    return rollout.reward


async def killed_in_flight(stack: Stack) -> Rollout:
    """A rollout of `SIMPLE` whose resources server is killed while its policy is asked."""
    asked = asyncio.Event()

    async def silent(body: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    running = asyncio.create_task(stack.run(ROW, policy=silent, environment=SIMPLE))
    await asked.wait()
    os.kill(server_pid(await stack.status(), SIMPLE, SIMPLE), signal.SIGKILL)
    return await asyncio.wait_for(running, 20)


async def test_a_failing_environment_leaves_the_other_five_serving(tmp_path: Path) -> None:
    """One does not start; another is killed while all serve, and comes back."""
    broken = faulty(tmp_path, "broken", fault="die")
    others = [EnvironmentConfig(name=faulty(tmp_path, f"fine_{n}").name) for n in range(4)]
    names = [SIMPLE, *(each.name for each in others)]
    said: list[str] = []
    async with acquire(stack_config(SIMPLE, broken, *others), progress=said.append) as stack:
        assert any("warning" in line and "no such luck" in line for line in said)
        assert await asyncio.gather(*(score(stack, name) for name in names)) == [1.0] + [0.5] * 4
        lost = await stack.run(ROW, policy=call_then_answer, environment=broken.name)
        assert lost.error is not None
        assert (lost.reward, lost.error.kind, lost.error.server) == (None, "infrastructure", "faulty")
        assert "no such luck" in lost.error.message
        killed = await killed_in_flight(stack)
        assert killed.error is not None
        assert (killed.error.kind, killed.error.server) == ("infrastructure", SIMPLE)
        assert await asyncio.gather(*(score(stack, name) for name in names)) == [1.0] + [0.5] * 4
        assert (await stack.status())["environments"][SIMPLE]["generation"] == 2


async def test_a_stack_of_which_nothing_starts_does_not_start(tmp_path: Path) -> None:
    broken = [faulty(tmp_path, f"broken_{n}", fault="die") for n in range(2)]
    with pytest.raises(StackStartError, match="no such luck"):
        async with acquire(stack_config(*broken)):
            pass
