"""An agent that passes nothing of its rollout on: a process per rollout, and no call that reaches another one's policy."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire, acquire_sync
from support.agents import (
    TOOLS,
    StampingPolicy,
    environment_with,
    environment_with_forgetful_agent,
    stamped_row,
)
from support.stacks import all_gone, pids_of, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(300)]

Policy = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


async def run(stack: Stack, policies: Sequence[StampingPolicy], **fields: Any) -> list[Rollout]:
    return await asyncio.gather(
        *(stack.run(stamped_row(each.number, **fields), policy=each) for each in policies)
    )


def policies(count: int, first: int = 1) -> list[StampingPolicy]:
    return [StampingPolicy(number, TOOLS) for number in range(first, first + count)]


def silent_policy() -> tuple[asyncio.Event, Policy]:
    """A policy that never answers, and the event that it was asked."""
    asked = asyncio.Event()

    async def silent(body: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        await asyncio.Event().wait()
        return {}

    return asked, silent


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackConfig]:
    """Of a stack that is up, whose agent has one process."""
    path = environment_with_forgetful_agent(tmp_path_factory.mktemp("forgetful"))
    config = stack_config(path, agent_processes=1)
    with acquire_sync(config):
        yield config


@pytest.mark.parametrize("version", ["0.7.0", pytest.param("0.6.0", marks=pytest.mark.heavy)])
async def test_more_rollouts_than_processes(tmp_path: Path, version: str) -> None:
    config = stack_config(environment_with_forgetful_agent(tmp_path), version=version, agent_processes=3)
    async with acquire(config) as stack:
        asked = policies(8)
        for rollout, policy in zip(await run(stack, asked), asked, strict=True):
            assert rollout.error is None
            assert (rollout.reward, policy.seen, policy.calls) == (1.0, {policy.number}, 2)
            assert len(rollout.policy_calls) == 2
        status = await stack.status()
    assert await all_gone(pids_of(status))


async def test_a_late_call_reaches_nobody(one_process: StackConfig) -> None:
    """The first rollout's agent answers and goes on calling; the place is the second one's then."""
    async with acquire(one_process) as stack:
        asked = policies(4)
        for rollout, policy in zip(await run(stack, asked, fault="late"), asked, strict=True):
            assert (rollout.error, rollout.reward, policy.seen) == (None, 1.0, {policy.number})


async def test_a_dead_agent_is_one_rollouts_failure(tmp_path: Path) -> None:
    config = stack_config(environment_with_forgetful_agent(tmp_path), agent_processes=2)
    async with acquire(config) as stack:
        dying, well = policies(1), policies(3, first=2)
        (lost,), others = await asyncio.gather(run(stack, dying, fault="die"), run(stack, well))
        assert lost.error is not None
        assert (lost.error.type, lost.reward) == ("ServerDiedError", None)
        assert "exit status 3" in lost.error.message
        assert [rollout.reward for rollout in others] == [1.0] * 3
        (again,) = await run(stack, policies(1, first=9))
        assert again.reward == 1.0


async def test_a_process_is_free_again_after_a_timeout_and_a_cancellation(one_process: StackConfig) -> None:
    """Rollouts whose policy never answers: the third one gets the process that both have given back."""
    asked, silent = silent_policy()
    async with acquire(one_process) as stack:
        late = await stack.run(stamped_row(1), policy=silent, limits=RolloutLimits(timeout_s=1))
        assert late.error is not None
        assert late.error.kind == "timeout"
        asked.clear()
        cancelled = asyncio.create_task(stack.run(stamped_row(2), policy=silent))
        await asked.wait()
        cancelled.cancel()
        await asyncio.wait([cancelled])
        (rollout,) = await run(stack, policies(1, first=3))
        assert rollout.reward == 1.0


async def test_a_rollouts_deadline_covers_its_wait_for_a_process(one_process: StackConfig) -> None:
    """Behind one that holds the only process for longer."""
    asked, silent = silent_policy()
    async with acquire(one_process) as stack:
        holds = asyncio.create_task(stack.run(stamped_row(1), policy=silent))
        await asked.wait()
        async with asyncio.timeout(1 + 2):
            late = await stack.run(stamped_row(2), policy=silent, limits=RolloutLimits(timeout_s=1))
        assert late.error is not None
        assert (late.status, late.error.kind) == ("failed", "timeout")
        assert "free process" in late.error.message
        assert not holds.done()
        holds.cancel()
        await asyncio.wait([holds])


async def test_the_resources_servers_death_fails_the_rollout_and_all_come_back(
    one_process: StackConfig,
) -> None:
    asked, silent = silent_policy()
    async with acquire(one_process) as stack:
        running = asyncio.create_task(stack.run(stamped_row(1), policy=silent))
        await asked.wait()
        (place,) = (await stack.status())["environments"].values()
        os.kill(place["servers"]["stamps"]["pid"], signal.SIGKILL)
        rollout = await asyncio.wait_for(running, 10)
        assert rollout.error is not None
        assert rollout.error.server == "stamps"
        (again,) = await run(stack, policies(1, first=2))
        assert again.reward == 1.0


async def test_a_harness_that_fails_is_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of a command that ends at once scores 0; nobody has asked the policy."""
    broken = tmp_path / "programs" / "codex"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && echo codex-cli 1.2.3 && exit\nexit 7\n")
    broken.chmod(0o755)
    settings = {"model": "m", "codex_version": "1.2.3", "timeout": 60, "concurrency": 1}
    config = stack_config(environment_with(tmp_path, "codex_agent", **settings))
    monkeypatch.setenv("PATH", f"{broken.parent}{os.pathsep}{os.environ['PATH']}")
    async with acquire(config) as stack:
        (rollout,) = await run(stack, policies(1))
    assert rollout.error is not None
    assert (rollout.status, rollout.reward, rollout.error.kind) == ("failed", None, "environment")
    assert rollout.error.type == "PolicyNeverAskedError"
    assert "7" in rollout.error.message


async def test_an_agent_with_a_model_elsewhere_is_refused_at_the_start(tmp_path: Path) -> None:
    """Its calls would not reach the policy, whose reward it would be."""
    environment_with_forgetful_agent(tmp_path)
    path = environment_with(tmp_path, "forgetful", model_server=None, base_url="https://model.example.com/v1")
    with pytest.raises(ConfigError, match=r"'agent'.*model_server"):
        async with acquire(stack_config(path)):
            pass
