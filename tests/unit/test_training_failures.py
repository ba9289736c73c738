"""Failures of rollouts, rows and stacks that trainers get as data. No Gym: a stand-in takes the stack's place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from gymgate.core.config import RolloutLimits, StackConfig
from gymgate.core.errors import (
    ConfigError,
    DataError,
    GymgateError,
    RolloutTimeoutError,
    StackLostError,
    StackStartError,
)
from gymgate.integrations.training.rollouts import RolloutRunner, SampledRollout
from gymgate.rollouts import Rollout
from gymgate.stack import AgentInfo, Stack
from gymgate.tokens import Sample, TokenPolicy
from gymgate.tokens.engines import CallableEngine

CONVERSATION = TokenPolicy(
    CallableEngine(lambda ids, sampling: Sample([1], None, "stop")),
    SimpleNamespace(),  # type: ignore[arg-type]
).conversation()
ROW = {"responses_create_params": {"input": "hi"}}


class FakeStack:
    """Answers each row as `run` says, and knows whether it was closed."""

    names: ClassVar[dict[str, str]] = {}
    refuse_training = Stack.refuse_training

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self.agents = {"a_agent": AgentInfo("a", "a_agent", "simple_agent")}
        self.closed = 0
        self._run = run

    async def run(self, row: Any, *, environment: str, **_: Any) -> Rollout:
        await self._run(row)
        return Rollout(id="r", environment=environment, agent="a_agent", status="completed", reward=1.0)

    async def close(self) -> None:
        self.closed += 1


def runner_on(monkeypatch: pytest.MonkeyPatch, *stacks: FakeStack | GymgateError) -> RolloutRunner:
    """A runner that connects to these stacks, one after the other; an error stands for a start that fails."""
    left = iter(stacks)

    async def connect(config: StackConfig, **_: Any) -> Any:
        await asyncio.sleep(0)
        stack = next(left)
        if isinstance(stack, GymgateError):
            raise stack
        return stack

    monkeypatch.setattr("gymgate.integrations.training.rollouts.connect", connect)
    return RolloutRunner(StackConfig(environments=("a",)), RolloutLimits(timeout_s=5))


def told(attempt: SampledRollout) -> tuple[str, str, bool]:
    error = attempt.rollout.error
    assert error is not None
    assert (attempt.rollout.status, attempt.rollout.reward) == ("failed", None)
    return error.kind, error.type, error.retryable


async def fine(_: Any) -> None:
    """A rollout that ends at once."""


async def lost(_: Any) -> None:
    raise StackLostError("the stack's daemon is gone")


@pytest.mark.parametrize("error", [ConfigError("agent 'x' is not in this stack"), DataError("no input")])
async def test_a_row_that_cannot_be_run_is_a_failed_rollout(
    monkeypatch: pytest.MonkeyPatch, error: GymgateError
) -> None:
    async def some(row: Any) -> None:
        if "bad" in row:
            raise error

    stack = FakeStack(some)
    runner = runner_on(monkeypatch, stack)
    bad, good = await asyncio.gather(
        runner.run("a", {**ROW, "bad": True}, CONVERSATION), runner.run("a", ROW, CONVERSATION)
    )
    assert told(bad) == ("data", "DataError", False)
    assert good.rollout.reward == 1
    assert stack.closed == 0


async def test_a_row_of_an_unknown_agent_is_a_failed_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an environment, as verl's rows may come."""
    runner = runner_on(monkeypatch, FakeStack(fine))
    unknown = await runner.run("", {**ROW, "agent_ref": {"name": "x"}}, CONVERSATION)
    assert told(unknown) == ("data", "DataError", False)
    known = await runner.run("", {**ROW, "agent_ref": {"name": "a_agent"}}, CONVERSATION)
    assert known.rollout.environment == "a"


async def test_a_start_that_fails_is_a_failed_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that wait for it fail together, and the next one connects."""
    stack = FakeStack(fine)
    runner = runner_on(monkeypatch, StackStartError("a did not listen"), stack)
    failed = await asyncio.gather(*(runner.run("a", ROW, CONVERSATION) for _ in range(16)))
    assert {told(one) for one in failed} == {("infrastructure", "StackStartError", True)}
    assert (await runner.run("a", ROW, CONVERSATION)).rollout.reward == 1
    await runner.close()
    assert stack.closed == 1


async def test_a_lost_stack_is_a_failed_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Stack` connects again by itself: tests/unit/test_leases.py."""
    runner = runner_on(monkeypatch, FakeStack(lost))
    assert told(await runner.run("a", ROW, CONVERSATION)) == ("infrastructure", "StackLostError", True)


async def test_a_missed_deadline_leaves_the_stack_to_the_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(row: Any) -> None:
        if "slow" in row:
            raise RolloutTimeoutError("Timed out after 5 s")

    stack = FakeStack(slow)
    runner = runner_on(monkeypatch, stack)
    missed = await runner.run("a", {**ROW, "slow": True}, CONVERSATION)
    assert told(missed) == ("timeout", "RolloutTimeoutError", True)
    assert (await runner.run("a", ROW, CONVERSATION)).rollout.reward == 1
    assert stack.closed == 0


async def test_a_first_start_that_fails_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StackStartError, match="did not listen"):
        await runner_on(monkeypatch, StackStartError("a did not listen")).start()


async def test_a_start_that_is_under_way_ends_with_close(monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def connect(config: StackConfig, **_: Any) -> Any:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr("gymgate.integrations.training.rollouts.connect", connect)
    runner = RolloutRunner(StackConfig(environments=("a",)), RolloutLimits(timeout_s=5))
    waiting = asyncio.create_task(runner.run("a", ROW, CONVERSATION))
    await began.wait()
    await runner.close()
    assert ended.is_set()
    assert told(await waiting) == ("infrastructure", "StackLostError", True)
