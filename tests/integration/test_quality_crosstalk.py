"""64 rollouts at once, and 256, over six environments of one stack: each policy stamps its answers, and sees no other stamp."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from typing import Any

import pytest

from gymgate.core.config import RuntimeConfig, StackConfig
from gymgate.gym.catalog import Catalog
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import ensure_runtime
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire

pytestmark = [pytest.mark.gym, pytest.mark.timeout(900)]  # the first use of a release installs it

COUNTER = "example_session_state_mgmt"
ENVIRONMENTS = (
    COUNTER,
    "workplace_assistant",
    "example_single_tool_call",
    "example_multi_step",
    "calendar",
    "string_match",
)
STAMP = re.compile(r"stamp-(\d+)-")


class Stamping:
    """Calls each rollout's first tool, twice for the counter, then answers; everything carries the stamp."""

    def __init__(self, number: int, environment: str) -> None:
        self.number = number
        self.seen: set[int] = set()
        self.calls = 0
        self.tools = [("increment_counter", {"count": number}), ("get_counter_value", {})]
        self.counts = environment == COUNTER

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        self.seen |= {int(stamp) for stamp in STAMP.findall(json.dumps(request))}
        message: dict[str, Any] = {"role": "assistant", "content": f"stamp-{self.number}-"}
        done = sum(item["role"] == "tool" for item in request["messages"])
        if self.counts and done < len(self.tools):
            name, arguments = self.tools[done]
            function = {"name": name, "arguments": json.dumps(arguments)}
            call_id = f"stamp-{self.number}-{done}"
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
        }
        return {
            "id": f"chatcmpl-{self.number}-{self.calls}",
            "object": "chat.completion",
            "created": 0,
            "model": "stamping",
            "choices": [choice],
        }


def first_rows(site_catalog: Catalog) -> dict[str, dict[str, Any]]:
    rows = {name: open_rows("example", environment=site_catalog.find(name))[0].data for name in ENVIRONMENTS}
    return {name: {k: v for k, v in row.items() if k != "agent_ref"} for name, row in rows.items()}


async def rollout(stack: Stack, row: dict[str, Any], environment: str, policy: Stamping) -> Rollout:
    return await stack.run(row, policy=policy, environment=environment, rollout_id=f"r{policy.number}")


@pytest.mark.parametrize("count", [64, pytest.param(256, marks=pytest.mark.heavy)])
async def test_no_call_reaches_another_rollouts_policy(count: int) -> None:
    runtime = await asyncio.to_thread(ensure_runtime, RuntimeConfig())
    rows = first_rows(Catalog(runtime.site, runtime.version))
    policies = [
        Stamping(number, environment)
        for number, environment in zip(range(1, count + 1), itertools.cycle(ENVIRONMENTS), strict=False)
    ]
    places = [ENVIRONMENTS[n % len(ENVIRONMENTS)] for n in range(count)]
    async with acquire(StackConfig(environments=ENVIRONMENTS)) as stack:
        started = time.monotonic()
        rollouts = await asyncio.gather(
            *(
                rollout(stack, rows[place], place, policy)
                for place, policy in zip(places, policies, strict=True)
            )
        )
        assert time.monotonic() - started < 40
        assert (await stack.status())["rollouts"] == 0
    assert [item.error for item in rollouts] == [None] * count
    for item, policy, place in zip(rollouts, policies, places, strict=True):
        assert policy.seen <= {policy.number}
        assert len(item.policy_calls) == policy.calls
        output = (item.result or {})["response"]["output"]
        assert {int(stamp) for stamp in STAMP.findall(json.dumps(output))} == {policy.number}
        if place == COUNTER:
            counts = [part["output"] for part in output if part["type"] == "function_call_output"]
            assert json.loads(counts[-1])["count"] == rows[COUNTER]["initial_count"] + policy.number
