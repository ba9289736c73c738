"""Episodes that an environment server owns: a user and an assistant, and everything that can go wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gymgate import Rollout, Stack, outcome_of
from gymgate.core.config import EnvironmentConfig, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, StackLostError
from gymgate.stack import acquire
from support.episodes import assistant, both, episode_row, episodes, none_open, open_sessions, user
from support.stacks import all_gone, pids_of, server_pid, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> StackConfig:
    tree = tmp_path_factory.mktemp("episodes")
    paths = (episodes(tree, name) for name in ("duet", "duet_same", "duet_tight"))
    return stack_config(
        *(EnvironmentConfig(name=str(path)) for path in paths), models={"user_model": "policy"}
    )


async def play(stack: Stack, row: dict[str, Any], environment: str = "duet", **settings: Any) -> Rollout:
    """Run a row with a policy that plays assistant and user."""
    name = f"p-{id(row)}"
    policy = stack.register(name, both(row.get("stamp", "s")), dialect="responses")
    return await stack.run(row, policy=policy, environment=environment, **settings)


def callers(rollout: Rollout) -> Counter[tuple[str, str | None]]:
    return Counter((call.model_server, call.agent) for call in rollout.calls)


async def test_an_episode_is_scored_and_each_call_recorded_with_its_agent(stack: Stack) -> None:
    rollout = await play(stack, episode_row())
    assert (rollout.status, rollout.reward, rollout.error) == ("completed", 1.0, None)
    assert rollout.agent == "duet_assistant"
    assert callers(rollout) == {("user_model", "duet_user"): 2, ("policy_model", "duet_assistant"): 3}
    assert "_ng_trajectory" not in str(rollout.result)
    assert await none_open(stack, "duet")


async def test_environment_servers_are_shown_among_the_servers(stack: Stack) -> None:
    status = await stack.status()
    assert {"duet", "duet_resources", "duet_user", "duet_assistant"} == {
        *status["environments"]["duet"]["servers"]
    }


ENVIRONMENT = ("environment", "EnvironmentServerError")
FAILURES = {
    "seed": ENVIRONMENT,
    "agent": ENVIRONMENT,
    "verification": ENVIRONMENT,
    "cleanup": ENVIRONMENT,
    "unhandled": ENVIRONMENT,
    "terminal": ENVIRONMENT,
    "judge_failed": ("policy", "JudgeError"),
    "judge_unparseable": ("policy", "JudgeError"),
    "wrong episode": ENVIRONMENT,
    "both": ENVIRONMENT,
    "neither": ENVIRONMENT,
}
PARTIAL = {"verification", "cleanup", "terminal"}
TERMINAL = {"unhandled", "terminal"}


@pytest.mark.parametrize("fail", FAILURES)
async def test_each_failure_is_one_of_ours(stack: Stack, fail: str) -> None:
    """It has no reward, keeps what the agent had answered, and leaves no session open."""
    rollout = await play(stack, episode_row(fail=fail))
    assert (rollout.status, rollout.reward) == ("failed", None)
    error = rollout.error
    assert error is not None
    assert (error.kind, error.type) == FAILURES[fail]
    assert error.terminal is (fail in TERMINAL)
    outcome = outcome_of(rollout)
    assert (outcome.reward, outcome.retryable) == (None, fail not in TERMINAL)
    kept = (rollout.result or {}).get("response")
    assert (kept is not None) is (fail in PARTIAL)
    assert not kept or kept["output"][-1]["content"][0]["text"] == "assistant s"
    assert await none_open(stack, "duet")


async def test_no_reward_is_no_number(stack: Stack) -> None:
    rollout = await play(stack, episode_row(fail="no reward"))
    assert (rollout.status, rollout.reward) == ("failed", None)
    assert getattr(rollout.error, "type", None) == "PolicyNeverAskedError"


async def test_a_failed_policy_call_is_the_reason_of_the_episode(stack: Stack) -> None:
    def fails(body: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("the engine is out of memory")

    policy = stack.register("fails", fails, dialect="responses")
    judge = stack.register("user", user, dialect="responses")
    rollout = await stack.run(episode_row(), policy=policy, judge_policy=judge, environment="duet")
    assert rollout.error is not None
    assert (rollout.error.kind, "out of memory" in rollout.error.message) == ("policy", True)
    assert await none_open(stack, "duet")


async def test_a_limit_truncates_an_episode(stack: Stack) -> None:
    rollout = await play(stack, episode_row(), limits=RolloutLimits(max_calls=1))
    assert (rollout.status, rollout.limit, rollout.reward) == ("truncated", "max_calls", None)
    assert await none_open(stack, "duet")


async def test_an_episode_that_takes_too_long(stack: Stack) -> None:
    rollout = await play(stack, episode_row(fail="timeout"), "duet_tight")
    assert rollout.error is not None
    assert (rollout.error.kind, rollout.error.type, rollout.reward) == (
        "timeout",
        "RolloutTimeoutError",
        None,
    )
    assert outcome_of(rollout).retryable
    assert await none_open(stack, "duet_tight", "duet_tight")


class Gate:
    """A policy for the assistant that answers when it is told to."""

    def __init__(self, stack: Stack, name: str) -> None:
        self.asked, self.opened = asyncio.Event(), asyncio.Event()
        self.policy = stack.register(name, self.say, dialect="responses")
        self.user = stack.register(f"{name}-user", user, dialect="responses")

    async def say(self, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.set()
        await self.opened.wait()
        answered: dict[str, Any] = assistant()(body)
        return answered

    def run(self, stack: Stack, environment: str, **fields: Any) -> asyncio.Task[Rollout]:
        row = episode_row(**fields)
        running = stack.run(row, policy=self.policy, judge_policy=self.user, environment=environment)
        return asyncio.create_task(running)


async def test_an_episode_that_is_not_admitted_may_be_tried_again(stack: Stack) -> None:
    gate = Gate(stack, "gate")
    first = gate.run(stack, "duet_tight", turns=1)
    await asyncio.wait_for(gate.asked.wait(), 30)
    refused = await play(stack, episode_row(), "duet_tight")
    assert refused.error is not None
    assert (refused.error.kind, refused.error.type) == ("infrastructure", "EnvironmentBusyError")
    assert (refused.error.server, refused.error.retryable, refused.reward) == ("duet_tight", True, None)
    gate.opened.set()
    await first
    assert await none_open(stack, "duet_tight", "duet_tight")


async def test_a_cancelled_episode_leaves_no_session(stack: Stack) -> None:
    gate = Gate(stack, "cancelled")
    running = gate.run(stack, "duet")
    await asyncio.wait_for(gate.asked.wait(), 30)
    assert await open_sessions(stack, "duet") == {"resources": 1, "user": 1, "assistant": 1}
    running.cancel()
    await asyncio.wait([running])
    assert await none_open(stack, "duet")


async def test_fifty_at_once_do_not_mix(stack: Stack) -> None:
    rows = [episode_row(f"stamp{number:02d}") for number in range(50)]
    rollouts = await asyncio.gather(*(play(stack, row, record_bodies=True) for row in rows))
    for row, rollout in zip(rows, rollouts, strict=True):
        assert (rollout.status, rollout.reward) == ("completed", 1.0), rollout.error
        said = str([(call.request, call.response) for call in rollout.calls])
        assert said.count("stamp") == said.count(row["stamp"]) > 0
        assert callers(rollout).total() == 5
    assert await none_open(stack, "duet")


async def test_a_user_with_an_endpoint_of_its_own(stack: Stack) -> None:
    """Each agent's calls reach its own endpoint, and no other."""
    seen: dict[str, list[Any]] = {"policy": [], "user": []}

    def listening(name: str, say: Any) -> Any:
        return lambda body: seen[name].append(body["input"]) or say(body)

    policy = stack.register("own-policy", listening("policy", assistant()), dialect="responses")
    judge = stack.register("own-user", listening("user", user), dialect="responses")
    rollout = await stack.run(episode_row(), policy=policy, judge_policy=judge, environment="duet")
    assert rollout.reward == 1.0
    assert (len(seen["policy"]), len(seen["user"])) == (3, 2)
    assert all("turn" in str(asked) for asked in seen["user"])
    assert not any("turn" in str(asked) for asked in seen["policy"])


async def test_two_agents_on_the_policys_model_server_are_told_apart(stack: Stack) -> None:
    """Both are the policy, so nobody knows which one to train."""
    rollout = await play(stack, episode_row(), "duet_same")
    assert (rollout.reward, rollout.agent) == (1.0, "duet_same")
    assert callers(rollout) == {
        ("policy_model", "duet_same_user"): 2,
        ("policy_model", "duet_same_assistant"): 3,
    }
    setting = "duet_same.environment_servers.duet.agent_server"
    assert setting in (stack.agents["duet_same_user"].untrainable or "")
    with pytest.raises(ConfigError, match=setting):
        stack.refuse_training("duet_same")
    stack.refuse_training("duet")


async def test_the_agent_that_nemo_gym_attributes_is_the_policy(tmp_path: Path) -> None:
    """The other one is asked as a judge that is the policy is, so a trainer's policy sees the assistant's turns only."""
    path = episodes(tmp_path, "duet_same")
    attributed = (
        "duet_same.environment_servers.duet.agent_server",
        {"type": "responses_api_agents", "name": "duet_same_assistant"},
    )
    environment = EnvironmentConfig(name=str(path), overrides=(("+" + attributed[0], attributed[1]),))
    async with acquire(stack_config(environment)) as stack:
        policy = stack.register("trained", assistant(), dialect="responses")
        other = stack.register("other", user, dialect="responses")
        rollout = await stack.run(episode_row(), policy=policy, judge_policy=other)
        assert (rollout.reward, rollout.agent) == (1.0, "duet_same_assistant")
        stand_in = "policy_model_as_duet_same_user"
        assert callers(rollout) == {
            (stand_in, "duet_same_user"): 2,
            ("policy_model", "duet_same_assistant"): 3,
        }
        assert stack.agents["duet_same_user"].untrainable is None


@pytest.mark.parametrize("routed", ["server", "taskset", "agent", "unknown server"])
async def test_where_a_row_goes(stack: Stack, routed: str) -> None:
    """To the environment server that it names, by its taskset, or to the one that its agent is behind."""
    row = episode_row()
    task = {"task_id": {"taskset": "duet_same:tests", "task_id": "7"}, "task_input": row}
    rows = {
        "server": {**row, "_ng_environment_server": "duet_same", "agent_ref": {"name": "duet_user"}},
        "taskset": task,
        "agent": {**row, "agent_ref": {"name": "duet_same_user"}},
        "unknown server": {
            **row,
            "_ng_environment_server": "of_another_release",
            "agent_ref": {"name": "duet_same_user"},
        },
    }
    policy = stack.register("anywhere", both(), dialect="responses")
    rollout = await stack.run(rows[routed], policy=policy)
    assert (rollout.environment, rollout.agent, rollout.reward) == ("duet_same", "duet_same", 1.0)


async def test_an_agent_behind_several_environment_servers_is_refused_with_their_names(
    tmp_path: Path,
) -> None:
    path = episodes(tmp_path)
    more = "\nsecond:\n  environment_servers:\n    legacy_agent:\n      entrypoint: app.py\n      agent_server: {type: "
    path.write_text(path.read_text() + more + "responses_api_agents, name: duet_assistant}\n")
    environment = EnvironmentConfig(name=str(path))
    async with acquire(stack_config(environment, models={"user_model": "policy"})) as stack:
        row = {**episode_row(), "agent_ref": {"name": "duet_assistant"}}
        with pytest.raises(ConfigError, match="duet, second"):
            await play(stack, row, "duet")
        assert (await play(stack, {**row, "_ng_environment_server": "duet"}, "duet")).reward == 1.0


async def test_a_killed_environment_server_fails_its_episodes_and_is_replaced(tmp_path: Path) -> None:
    path = episodes(tmp_path)
    config = stack_config(EnvironmentConfig(name=str(path)), models={"user_model": "policy"})
    async with acquire(config) as stack:
        gate = Gate(stack, "killed")
        running = gate.run(stack, "duet")
        await asyncio.wait_for(gate.asked.wait(), 30)
        os.kill(server_pid(await stack.status(), "duet", "duet"), signal.SIGKILL)
        failed = [await running, await play(stack, episode_row(fail="crash"))]
        assert [getattr(rollout.error, "type", None) for rollout in failed] == ["ServerDiedError"] * 2
        assert (await play(stack, episode_row())).reward == 1.0
        assert await none_open(stack, "duet")


async def test_a_stack_that_ends_does_not_wait_for_the_episodes_to_be_cleaned_up(tmp_path: Path) -> None:
    path = episodes(tmp_path)
    config = stack_config(EnvironmentConfig(name=str(path)), models={"user_model": "policy"})
    async with acquire(config) as stack:
        gate = Gate(stack, "ended")
        running = gate.run(stack, "duet")
        await asyncio.wait_for(gate.asked.wait(), 30)
        status = await stack.status()
        os.kill(server_pid(status, "duet", "duet_resources"), signal.SIGSTOP)  # its session cannot be closed
        began = time.monotonic()
        await stack.close()
        with pytest.raises(StackLostError):
            await running
        assert time.monotonic() - began < 20
        assert await all_gone(pids_of(status))
