"""A judge that is missing or dies, on real Gym servers: what it was asked for and could not answer is failed, never 0."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, NeedMissingError
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire, acquire_sync
from gymgate.stack.ports import HeldPort
from support.judges import Death, MortalJudge, endpoint, judged, row, saying
from support.stacks import ROW, SIMPLE, answer, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(300)]

KEYED = ("post", "task", "call_judge", "raising", "timeout")
KEYLESS = {"empty_context": "judge_model", "client": "judge_model", "thread": "judge_model"}
KEYLESS |= {"address": "judge_base_url"}


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The judge's, for as long as the stack is up."""
    held = HeldPort()
    yield held.number
    held.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return judged(tmp_path_factory.mktemp("judged"))


@pytest.fixture(scope="module")
def config(path: str, port: int) -> Iterator[StackConfig]:
    """Of a stack that is up."""
    config = stack_config(path, models={"*": endpoint(port)})
    with acquire_sync(config):
        yield config


@pytest.fixture
async def stack(config: StackConfig) -> AsyncIterator[Stack]:
    async with acquire(config) as stack:
        yield stack


async def run_all(stack: Stack, jobs: Sequence[tuple[str, str]], **fields: Any) -> list[Rollout]:
    """A rollout at once for each way and text."""
    return await asyncio.gather(*(stack.run(row(way), policy=saying(text), **fields) for way, text in jobs))


def assert_failed_by_judge(rollout: Rollout, name: str = "judge_model") -> None:
    assert (rollout.status, rollout.reward) == ("failed", None), rollout.result
    assert rollout.error is not None
    assert (rollout.error.kind, rollout.error.type, rollout.error.judge) == ("policy", "JudgeError", True)
    assert f"model server '{name}'" in rollout.error.message


@pytest.mark.parametrize("death", ["answers 500", "hangs up", "refuses"])
async def test_a_judge_that_dies_fails_the_rollouts_that_it_was_asked_for(
    stack: Stack, port: int, death: Death
) -> None:
    """These calls carry the rollout's key in their URL."""
    judge = MortalJudge(lives=6, death=death)
    async with judge.serving(port):
        jobs = [(way, f"{way} says {n}.") for n in range(3) for way in KEYED]
        rollouts = await run_all(stack, jobs)
        for (_, text), rollout in zip(jobs, rollouts, strict=True):
            if judge.has_answered(text):
                assert (rollout.status, rollout.reward, rollout.error) == ("completed", 1.0, None)
            else:
                assert_failed_by_judge(rollout)
        assert sum(rollout.reward == 1.0 for rollout in rollouts) == 6
        (bare,) = await run_all(stack, [("post", "without a body")], record_bodies=False)
        assert_failed_by_judge(bare)
        (unasked,) = await run_all(stack, [("none", "nobody is asked")])
        assert (unasked.status, unasked.reward) == ("completed", 0.25)


async def test_what_the_server_asks_again_counts(stack: Stack, port: int) -> None:
    judge = MortalJudge(lives=0)
    async with judge.serving(port):
        (dead,) = await run_all(stack, [("again", "twice")])
        assert_failed_by_judge(dead)
        first = judge.held = asyncio.Event()
        running = asyncio.create_task(run_all(stack, [("again", "then it lives")]))
        await judge.waits(1)
        second = judge.held = asyncio.Event()
        first.set()
        await judge.waits(2)
        judge.lives = 1
        second.set()
        (alive,) = await running
    assert (alive.status, alive.reward) == ("completed", 1.0)
    assert [call.status_code for call in alive.calls] == [200, 502, 200]


async def test_a_judge_that_the_server_waited_for_in_vain(stack: Stack, port: int) -> None:
    judge = MortalJudge()
    judge.held = asyncio.Event()
    async with judge.serving(port):
        (rollout,) = await run_all(stack, [("timeout", "too late")])
    assert_failed_by_judge(rollout)
    assert rollout.error is not None
    assert "closed" in rollout.error.message


@pytest.mark.parametrize("way", KEYLESS)
async def test_a_judge_asked_without_a_key_fails_what_ran_then(stack: Stack, port: int, way: str) -> None:
    """The failure cannot be attributed to a rollout; earlier and later ones are not concerned."""
    judge = MortalJudge()
    async with judge.serving(port):
        before = await run_all(stack, [(way, f"early {n}") for n in range(3)])
        assert [rollout.reward for rollout in before] == [1.0] * 3
        assert all(call.model_server == "policy_model" for rollout in before for call in rollout.calls)
        held = judge.held = asyncio.Event()
        running = asyncio.create_task(run_all(stack, [(way, f"{n} is held") for n in range(4)]))
        await judge.waits(4)
        judge.lives, judge.held = 0, None
        held.set()
        for rollout in await running:
            assert_failed_by_judge(rollout, KEYLESS[way])
            assert rollout.error is not None
            assert "one rollout" in rollout.error.message
        judge.lives = 1 << 30
        (after,) = await run_all(stack, [(way, "late")])
        assert (after.status, after.reward) == ("completed", 1.0)


async def test_a_judge_that_no_environment_has_is_refused_before_a_server_starts(
    path: str, port: int
) -> None:
    names = ("judge_model", "judge_base_url", "judge_modle")
    said: list[str] = []
    with pytest.raises(ConfigError, match="'judge_modle'"):
        async with acquire(
            stack_config(path, models={name: endpoint(port) for name in names}), progress=said.append
        ):
            pass
    assert not any("starting" in line for line in said), said


async def test_a_stack_without_a_needed_judge_does_not_start(path: str) -> None:
    said: list[str] = []

    async def refused(**models: Any) -> NeedMissingError:
        with pytest.raises(NeedMissingError) as caught:
            async with acquire(stack_config(path, models=models), progress=said.append):
                pass
        assert "\n" not in str(caught.value)
        return caught.value

    error = await refused()
    assert error.need == "judge judge_model"
    assert "'judge_model' " in str(error)
    assert "--judge judge_model=URL" in str(error)
    error = await refused(**{"*": "policy"})  # which is not there for calls without a rollout's key
    assert error.need == "judge judge_base_url"
    assert "--judge judge_base_url=URL" in str(error)
    assert not any("starting" in line for line in said)
    async with acquire(stack_config(path, models={"*": "none"})) as stack:
        unasked, asked = await run_all(stack, [("none", "no judge"), ("post", "a judge")])
        assert (unasked.status, unasked.reward) == ("completed", 0.25)
        assert_failed_by_judge(asked)
        (keyless,) = await run_all(stack, [("client", "a judge")])
        assert_failed_by_judge(keyless)


async def test_the_model_server_that_an_agent_has_for_its_policy_is_its_policy() -> None:
    """Whatever its name: it needs no endpoint, and its calls are the policy's."""
    server = f"{SIMPLE}_simple_agent.responses_api_agents.simple_agent.model_server.name"
    own = EnvironmentConfig(name=SIMPLE, overrides=((server, "policy_model_reasoning_off"),))

    def always_calls(body: dict[str, Any]) -> dict[str, Any]:
        return answer(call="get_weather")

    async with acquire(stack_config(own)) as stack:
        policy = stack.register("caller", always_calls, dialect="responses")
        rollout = await stack.run(ROW, policy=policy, limits=RolloutLimits(max_calls=2))
        assert (rollout.status, rollout.limit, rollout.error) == ("truncated", "max_calls", None)
        assert len(rollout.policy_calls) == len(rollout.calls) == 2
        assert rollout.timing.judge_s == 0
