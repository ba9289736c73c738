"""Real NeMo Gym under real verifiers, in one process: what a rollout leaves on its trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import verifiers.v1 as vf
from renderers.base import load_tokenizer
from renderers.configs import Qwen3RendererConfig

from gymgate.core.errors import ConfigError, DataError
from gymgate.integrations.verifiers.taskset import UNSCORED
from nemo_gym_env import load_environment
from support.scripted import COUNTER_PLAN, FINAL, ScriptedPolicy, make_tokenizer

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.asyncio(loop_scope="module")]

ENVIRONMENT = "example_session_state_mgmt"
TURNS = len(COUNTER_PLAN) + 1


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def env() -> AsyncIterator[vf.Env[Any]]:
    """The env that holds the stack for this module."""
    env = load_environment(env=ENVIRONMENT)
    async with env.serving():
        yield env


@pytest_asyncio.fixture(loop_scope="module")
async def policy() -> AsyncIterator[ScriptedPolicy]:
    async with ScriptedPolicy().serving() as policy:
        yield policy


async def run(env: vf.Env[Any], client: vf.ClientConfig, n: int = 2) -> list[vf.Trace[Any]]:
    """The traces of one group on the env's first task."""
    task = next(iter(env.taskset))
    context = vf.ModelContext(client=client, model="scripted", sampling=vf.SamplingConfig())
    episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in env.slots(task, n)))
    return [trace for episode in episodes for trace in episode.traces]


async def run_other(client: vf.ClientConfig, n: int = 2, **load: Any) -> list[vf.Trace[Any]]:
    """As `run`, in another env over the same stack."""
    env = load_environment(env=ENVIRONMENT, **load)
    async with env.serving():
        return await run(env, client, n)


def endpoint(policy: ScriptedPolicy) -> vf.EvalClientConfig:
    return vf.EvalClientConfig(base_url=policy.base_url, api_key_var="GYMGATE_TEST_NO_KEY")


def check_conversation(trace: vf.Trace[Any]) -> None:
    """One branch, every turn on it: the prompt, four reasoning turns, three tool results."""
    assert trace.ok, trace.errors
    assert trace.num_branches == 1
    (branch,) = trace.branches
    prompt = trace.task.data.prompt
    assert branch.messages[: len(prompt)] == prompt
    roles = [message.role for message in branch.messages[len(prompt) :]]
    assert roles == ["assistant", "tool"] * len(COUNTER_PLAN) + ["assistant"]
    thoughts = [message.reasoning_content for message in trace.assistant_messages]
    assert thoughts == [*(turn[0] for turn in COUNTER_PLAN), "done"]
    called = [call.name for message in trace.assistant_messages for call in message.tool_calls or []]
    assert called == [turn[1] for turn in COUNTER_PLAN]
    assert trace.last_reply == FINAL
    assert trace.rewards["reward"] == vf.Reward(score=1.0)
    assert trace.metrics[UNSCORED] == 0.0


async def test_a_conversation_with_tools_and_reasoning_is_one_branch(
    env: vf.Env[Any], policy: ScriptedPolicy
) -> None:
    traces = await run(env, endpoint(policy), n=4)
    for trace in traces:
        check_conversation(trace)
        assert trace.info["nemo_gym"]["result"]["reward"] == 1.0
        assert trace.info["nemo_gym"]["result"]["response"]["output"]
        assert len(trace.calls) == TURNS
    assert policy.calls == {"chat": 4 * TURNS}
    assert len({trace.info["nemo_gym"]["id"] for trace in traces}) == 4


async def test_the_same_over_the_responses_api(env: vf.Env[Any], policy: ScriptedPolicy) -> None:
    for trace in await run_other(endpoint(policy), dialect="responses"):
        check_conversation(trace)
    assert policy.calls == {"responses": 2 * TURNS}


def trainer(policy: ScriptedPolicy, tokenizer: Path) -> vf.TrainClientConfig:
    policy.tokenizer = load_tokenizer(make_tokenizer(tokenizer))
    return vf.TrainClientConfig(
        base_url=policy.base_url,
        api_key_var="GYMGATE_TEST_NO_KEY",
        renderer=Qwen3RendererConfig(),
        renderer_model_name=str(tokenizer),
    )


async def test_a_group_trains(env: vf.Env[Any], policy: ScriptedPolicy, tmp_path: Path) -> None:
    """verifiers' own training client, a real renderer and a byte tokenizer; only the engine is scripted."""
    traces = await run(env, trainer(policy, tmp_path), n=4)
    assert policy.calls == {"generate": 4 * TURNS}
    for trace in traces:
        check_conversation(trace)
        (branch,) = trace.branches
        sampled = [token for token, mask in zip(branch.token_ids, branch.sampled_mask, strict=True) if mask]
        assert policy.tokenizer.decode(sampled).count("<|im_end|>") == TURNS
        assert sum(branch.logprobs) == pytest.approx(-0.5 * len(sampled))


async def test_the_training_client_takes_chat_only(
    env: vf.Env[Any], policy: ScriptedPolicy, tmp_path: Path
) -> None:
    (trace,) = await run_other(trainer(policy, tmp_path), n=1, dialect="responses")
    assert not trace.ok
    assert trace.last_error is not None
    assert "chat-completions" in trace.last_error.message


async def test_a_rollout_that_verifiers_stops_is_not_an_error(
    env: vf.Env[Any], policy: ScriptedPolicy
) -> None:
    for trace in await run_other(endpoint(policy), env_config={"agent": {"max_turns": 2}}):
        assert trace.ok, trace.errors
        assert trace.stop_condition == "max_turns"
        assert trace.num_turns == 2
        assert trace.rewards == {"reward": None}
        assert trace.metrics[UNSCORED] == 1.0


async def test_a_rollout_that_verifiers_times_out_is_not_an_error(
    env: vf.Env[Any], policy: ScriptedPolicy
) -> None:
    policy.hang = True
    for trace in await run_other(endpoint(policy), env_config={"agent": {"timeout": {"rollout": 1}}}):
        assert trace.ok, trace.errors
        assert trace.stop_condition == "agent_timeout"
        assert trace.rewards == {"reward": None}


async def test_a_bound_on_calls_truncates(env: vf.Env[Any], policy: ScriptedPolicy) -> None:
    (trace,) = await run_other(endpoint(policy), n=1, max_calls=2)
    assert trace.num_turns == 2
    assert trace.is_truncated
    assert trace.ok, trace.errors


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_a_policy_that_fails_fails_the_rollout_with_its_status(
    env: vf.Env[Any], policy: ScriptedPolicy, status: int
) -> None:
    policy.fail = status
    (trace,) = await run(env, endpoint(policy), n=1)
    assert not trace.ok
    assert trace.last_error is not None
    assert (trace.last_error.type, trace.last_error.status_code) == ("ProviderError", status)
    assert "no capacity today" in trace.last_error.message
    assert trace.rewards == {}


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_a_policy_that_fails_for_a_moment_is_asked_again_within_the_turn(
    policy: ScriptedPolicy, dialect: str
) -> None:
    """As in `gymgate run`: verifiers counts a call and its retries as one turn."""
    policy.fail_first = [500, 429, 503]
    for trace in await run_other(endpoint(policy), n=1, dialect=dialect):
        check_conversation(trace)
        assert trace.num_turns == TURNS
    assert policy.calls.total() == TURNS + 3
    assert policy.fail_first == []


async def test_a_failure_of_gym_is_one_line(env: vf.Env[Any], policy: ScriptedPolicy) -> None:
    """A row that Gym's agent refuses."""
    task = next(iter(env.taskset))
    row = {**task.data.row, "responses_create_params": {"input": 3}}
    context = vf.ModelContext(client=endpoint(policy), model="scripted", sampling=vf.SamplingConfig())
    (slot,) = env.slots(task.with_data(row=row))
    episode = await env.run_slot(slot, context)
    error = episode.traces[0].last_error
    assert error is not None
    assert error.type == "HarnessError"
    assert "\n" not in error.message


async def test_without_our_env_the_harness_finds_the_stack_itself(
    env: vf.Env[Any], policy: ScriptedPolicy
) -> None:
    config = vf.resolve_env_config(
        {
            "id": "best-of-n",
            "n": 2,
            "agent": {"runtime": {"type": "subprocess"}},
            "taskset": {"id": "nemo-gym-env", "env": ENVIRONMENT},
        }
    )
    other = vf.load_environment(config)
    async with other.serving():
        traces = await run(other, endpoint(policy), n=1)
    assert len(traces) == 2
    for trace in traces:
        check_conversation(trace)
        assert trace.metrics["pass_at_n"] == 1.0


async def test_an_unknown_environment_is_refused_early_with_near_names() -> None:
    with pytest.raises(ConfigError, match="workplace_assistant"):
        load_environment(env="workplace_asistant")


async def test_a_row_for_an_agent_of_another_config_names_that_config() -> None:
    env = load_environment(env="structured_outputs", data="structured_outputs_v4_example")
    with pytest.raises(DataError, match=r"example\.jsonl:1: .*'structured_outputs_v4'"):
        next(iter(env.taskset))
    env = load_environment(env="structured_outputs", config="structured_outputs_v4", rows=2)
    assert [task.data.name for task in env.taskset] == ["structured_outputs:1", "structured_outputs:2"]
    each = load_environment(env="mcqa,calendar", rows=1)
    assert [task.data.name for task in each.taskset] == ["mcqa:1", "calendar:1"]
