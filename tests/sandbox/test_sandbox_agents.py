"""NeMo Gym's own agents repair the example's repository by commands in its container; some of their programs run inside it.

The image needs what `examples/own_sandbox/README.md` says; `$GYMGATE_TEST_AGENTS_IMAGE` names it. The containers share the host's
network, so that all traffic stays on loopback.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from gymgate import acquire
from gymgate.core.config import EnvironmentConfig
from support.sandboxes import CONFIG, EXAMPLE, ROWS, SOLVE, chat, no_containers, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(900)]

Policy = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
IMAGE = os.environ.get("GYMGATE_TEST_AGENTS_IMAGE")
TERMINUS = "responses_api_agents/terminus_2_sandboxed_agent/configs/terminus_2_sandboxed_agent.yaml"


async def by_tool(body: dict[str, Any]) -> dict[str, Any]:
    """The script by calls of the agent's own `bash`."""
    names = [tool["function"]["name"] for tool in body.get("tools", ())]
    done = sum(message["role"] == "tool" for message in body["messages"])
    if "bash" not in names or done >= len(SOLVE):
        return chat(None)
    answer = chat(SOLVE[done])
    function = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps({"command": SOLVE[done], "description": "a step"})
    return answer


async def by_keystrokes(body: dict[str, Any]) -> dict[str, Any]:
    """The script typed into terminus' terminal, in its JSON."""
    done = sum(message["role"] == "assistant" for message in body["messages"])
    typed = [{"keystrokes": f"{SOLVE[done]}\n", "duration": 1.0}] if done < len(SOLVE) else []
    text = {"analysis": "", "plan": "", "commands": typed, "task_complete": not typed}
    answer = chat(None)
    answer["choices"][0]["message"]["content"] = json.dumps(text)
    return answer


@pytest.mark.skipif(
    IMAGE is None, reason="GYMGATE_TEST_AGENTS_IMAGE names no image with the agents' programs"
)
@pytest.mark.parametrize(
    ("agent", "policy"),
    [
        (TERMINUS, by_keystrokes),
        (str(EXAMPLE / "agents" / "opencode.yaml"), by_tool),
        (str(EXAMPLE / "agents" / "pi.yaml"), by_tool),
    ],
    ids=["terminus_2_sandboxed_agent", "opencode_sandboxed_agent", "pi_sandboxed_agent"],
)
async def test_an_agent_repairs_the_repository(docker: str, agent: str, policy: Policy) -> None:
    assert docker
    spec = "fix_repo.resources_servers.fix_repo.sandbox_spec"
    environment = EnvironmentConfig(
        name=str(CONFIG),
        config=("fix_repo", agent),
        sandbox="docker",
        overrides=(
            (f"{spec}.image", IMAGE),
            (f"{spec}.resources.memory_mib", 2048),
            ("sandbox.docker.create.network", "host"),
        ),
    )
    async with acquire(stack_config(environment)) as stack:
        rollout = await stack.run(ROWS[0], policy=policy)
    assert (rollout.status, rollout.reward) == ("completed", 1.0)
    assert len(rollout.calls) >= len(SOLVE)
    assert await no_containers() is not None
