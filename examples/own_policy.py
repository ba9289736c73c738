"""A policy that is a Python function: it receives chat-completions requests and returns answers.

    python examples/own_policy.py

The function runs in this process; the agent and the scoring run in NeMo Gym's own interpreter.
"""

from __future__ import annotations

import asyncio
from typing import Any

import gymgate


async def call_the_first_tool(request: dict[str, Any]) -> dict[str, Any]:
    """Ask for the weather once, then answer."""
    asked = any(message["role"] == "tool" for message in request["messages"])
    message: dict[str, Any] = {"role": "assistant", "content": "It is cold in San Francisco."}
    if not asked:
        function = {"name": "get_weather", "arguments": '{"city": "San Francisco"}'}
        call = {"id": "call_1", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "stop" if asked else "tool_calls"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "own",
        "choices": [choice],
    }


async def main() -> None:
    environment = "example_single_tool_call"
    row = next(iter(gymgate.open_rows(environment)))
    async with gymgate.acquire(gymgate.StackConfig(environments=(environment,))) as stack:
        rollout = await stack.run(row.data, policy=call_the_first_tool)
    print(f"reward {rollout.reward} after {len(rollout.policy_calls)} model calls")


if __name__ == "__main__":
    asyncio.run(main())
