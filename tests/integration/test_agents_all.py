"""Every agent that can run here, each with eight rollouts at once whose policies are told apart by content.

No policy answers before all eight were asked. A policy stamps all that it says, its row's prompt asks for the same
stamp, and the environment looks for it in the answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import RolloutLimits, RuntimeConfig, StackConfig
from gymgate.gym.runtime import ensure_runtime
from gymgate.stack import acquire, acquire_sync
from support.agents import (
    ECHO,
    TOOLS,
    StampingPolicy,
    environment_with,
    environment_with_aviary,
    environment_with_forgetful_agent,
    environment_with_turns,
    stamp_of,
    stamped_row,
    verifiers_environment,
)
from support.stacks import stack_config

ROLLOUTS = 8
Json = dict[str, Any]


class Meeting:
    """Lets nobody's model call through before every rollout has made one: all of them are under way at once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._there: set[int] = set()
        self._all = asyncio.Event()

    def policy(self, policy: StampingPolicy) -> Callable[[Json], Awaitable[Json]]:
        async def answer(request: Json) -> Json:
            self._there.add(policy.number)
            if len(self._there) == self._size:
                self._all.set()
            await self._all.wait()
            return await policy(request)

        return answer


def plain(number: int) -> Json:
    return stamped_row(number)


def with_a_tool(number: int) -> Json:
    row = stamped_row(number)
    row["responses_create_params"]["tools"] = [ECHO]
    return row


def with_two_questions(number: int) -> Json:
    row = stamped_row(number)
    row["responses_create_params"]["input"] *= 2
    return row


def with_turns(number: int) -> Json:
    return stamped_row(number, follow_ups=["Once more."], expected_answer=stamp_of(number))


def of_verifiers(number: int) -> Json:
    return stamped_row(number, task_idx=number, answer=stamp_of(number))


def of_aviary(number: int) -> Json:
    return stamped_row(number, task_idx=number)


def a_plan(stamp: str, request: Json) -> str:
    """What the ReWOO graph reads a step from."""
    return f"Plan: say {stamp} #E1 = LLM[say {stamp}]"


@dataclass(frozen=True)
class Case:
    """An agent, how its environment is made, and what is to be seen."""

    agent: str
    settings: Json = field(default_factory=dict)
    row: Callable[[int], Json] = plain
    calls: int | None = 1
    """Policy calls of each rollout; `None`: at least one."""
    tool: str | None = None
    """The tool that each policy has used."""
    dialect: str = "responses"
    says: Callable[[str, Json], str] = lambda stamp, request: stamp
    make: Callable[..., str] = environment_with
    version: str = "0.7.0"
    meets: bool = True
    """Whether each rollout's first call is held until all have made theirs."""
    beside: tuple[str, ...] = ()
    """Installed in place of requirements that only a git server has."""


LANGGRAPH = {
    "orchestrator": Case("langgraph_agent", {"entrypoint": "orchestrator_agent.py"}, calls=None),
    "reflection": Case(
        "langgraph_agent", {"entrypoint": "reflection_agent.py", "max_reflections": 2}, calls=5
    ),
    "rewoo": Case("langgraph_agent", {"entrypoint": "rewoo_agent.py"}, calls=3, says=a_plan),
    "parallel_thinking": Case("langgraph_agent", {"entrypoint": "parallel_thinking_agent.py"}, calls=5),
}
CODEX = {"model": "gpt-5", "codex_version": "0.144.4", "sandbox_mode": "danger-full-access"}
CLAUDE = {"model": "claude-sonnet-4", "anthropic_api_key": "none", "max_turns": 5}
COMMON = {"concurrency": ROLLOUTS, "timeout": 400}
LIGHT = {
    "simple": Case("simple_agent", row=with_a_tool, calls=2, tool="echo"),
    "non_executing": Case("non_executing_simple_agent", row=with_a_tool, tool="echo"),
    "tool_simulation": Case("tool_simulation_agent"),
    "speed_bench": Case("speed_bench_agent", row=with_two_questions, calls=2),
    "proof_refinement": Case("proof_refinement_agent", {"max_correction_turns": 2}, calls=2),
    "gymnasium": Case("gymnasium_agent", row=with_turns, calls=2, make=environment_with_turns),
    "own": Case("forgetful", calls=2, dialect="chat", make=environment_with_forgetful_agent),
}
HEAVY = {
    "simple 0.6.0": Case("simple_agent", row=with_a_tool, calls=2, tool="echo", version="0.6.0"),
    **LANGGRAPH,
    "langchain_deepagents": Case(
        "langchain_deepagents_agent",
        {
            "entrypoint": "reasoning_search_agent.py",
            "tavily_api_key": "none",
            "max_search_results": 1,
            "max_input_tokens": 9999,
        },
        calls=None,
    ),
    "haystack": Case(
        "haystack_agent", {"pipeline_yaml": "configs/pipeline.yaml"}, with_a_tool, calls=2, tool="echo"
    ),
    "aviary": Case(
        "aviary_agent", {"max_steps": 4}, of_aviary, 1, "print_story", make=environment_with_aviary
    ),
    "verifiers": Case(
        "verifiers_agent",
        {"vf_env_id": "stamps_vf", "model_name": "m", "resources_server": None},
        of_verifiers,
        dialect="chat",
        make=verifiers_environment,
        beside=("verifiers==0.3.1",),
    ),
    "codex": Case("codex_agent", CODEX | COMMON, calls=2, tool="exec_command"),
    "codex by URL": Case(
        "codex_agent",
        CODEX
        | COMMON
        | {"model_server": None, "openai_base_url": "${policy_base_url}", "openai_api_key": "none"},
        calls=2,
        tool="exec_command",
    ),
    "claude_code": Case("claude_code_agent", CLAUDE | COMMON, calls=2, tool="Bash", dialect="messages"),
    "opencode": Case(
        "opencode_agent",
        {"model": "m", "opencode_version": "1.17.11", **COMMON},
        calls=None,
        tool="bash",
        dialect="chat",
    ),
    "pi": Case(
        "pi_agent", {"model": "m", "pi_version": "0.80.2", **COMMON}, calls=2, tool="bash", dialect="chat"
    ),
    "cline": Case(
        "cline_agent",
        {"model": "m", "cline_version": "3.0.57", "setup_timeout": 300, **COMMON},
        calls=None,
        dialect="chat",
    ),
    "kilocode": Case(
        "kilocode_agent",
        {
            "model": "m",
            "kilo_version": "7.7.7",
            "setup_timeout": 300,
            "kilo_config": {"permission": {"bash": "allow"}},
            **COMMON,
        },
        calls=None,
        tool="bash",
        dialect="chat",
    ),
    "openclaw": Case(
        "openclaw_agent",
        {"model": "gym/m", "openclaw_version": "2026.6.11", **COMMON},
        calls=None,
        dialect="chat",
    ),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackConfig]:
    """Of a stack that is up, with an environment for each of `LIGHT`."""
    directories = [tmp_path_factory.mktemp(case.agent) for case in LIGHT.values()]
    made = zip(LIGHT.values(), directories, strict=True)
    paths = [case.make(directory, case.agent, **case.settings) for case, directory in made]
    roots = tuple(map(str, directories))
    config = stack_config(*paths, component_roots=roots, agent_processes=ROLLOUTS)
    with acquire_sync(config):
        yield config


@pytest.mark.gym
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LIGHT)
async def test_no_call_of_a_light_agent_reaches_another_rollouts_policy(
    shared: StackConfig, name: str
) -> None:
    path = shared.environments[[*LIGHT].index(name)].name
    await check_eight_rollouts(LIGHT[name], shared, path)


@pytest.mark.gym
@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", HEAVY.values(), ids=HEAVY)
async def test_no_call_reaches_another_rollouts_policy(case: Case, tmp_path: Path) -> None:
    path = case.make(tmp_path, case.agent, **case.settings)
    config = stack_config(
        path, version=case.version, component_roots=(str(tmp_path),), agent_processes=ROLLOUTS
    )
    if case.beside:
        runtime = await asyncio.to_thread(ensure_runtime, RuntimeConfig(version=case.version), case.beside)
        config = config.model_copy(update={"runtime": RuntimeConfig(interpreter=str(runtime.python))})
    await check_eight_rollouts(case, config, path)


async def check_eight_rollouts(case: Case, config: StackConfig, path: str) -> None:
    policies = [StampingPolicy(number, TOOLS, case.says) for number in range(1, ROLLOUTS + 1)]
    meeting = Meeting(ROLLOUTS if case.meets else 1)
    async with acquire(config) as stack:
        limits = RolloutLimits(timeout_s=500)
        rollouts = await asyncio.gather(
            *(
                stack.run(case.row(each.number), policy=meeting.policy(each), limits=limits, environment=path)
                for each in policies
            )
        )
    for rollout, policy in zip(rollouts, policies, strict=True):
        assert rollout.error is None, rollout.error
        assert policy.seen == {policy.number}, "the prompt's stamp and no other"
        assert rollout.reward == 1.0, "its own answer was verified with its own row"
        assert len(rollout.policy_calls) == policy.calls
        assert case.calls in (None, policy.calls)
        assert policy.used[:1] == ([case.tool] if case.tool else [])
        assert {call.dialect for call in rollout.policy_calls} == {case.dialect}
        assert f"stamp-{policy.number}-" in json.dumps(rollout.result)
