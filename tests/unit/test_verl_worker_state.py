"""What an agent-loop worker keeps between rollouts; nothing of verl, no Gym."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.config import RolloutLimits, StackConfig
from gymgate.core.errors import StackStartError
from gymgate.integrations.training.rollouts import RolloutRunner
from gymgate.integrations.verl import worker as worker_room
from gymgate.integrations.verl.worker import LoopConfig, _workers, worker_of
from gymgate.stack import Stack

ENTRY = LoopConfig.model_validate({"environments": "mcqa"})


class Rollout(SimpleNamespace):
    """verl's rollout config: attributes, and a dict's `get`."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


ROLLOUT = Rollout(prompt_length=100, response_length=50, max_model_len=None)


@pytest.fixture(autouse=True)
def no_renderer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_room, "make_renderer", lambda *args: None)


class AloneStack(Stack):
    """A stack without a lease, and so without agents."""

    agents: Any = {}  # noqa: RUF012


async def test_a_failed_start_is_told_to_all_who_wait_and_the_next_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = []

    async def connect(config: StackConfig, **_: Any) -> Stack:
        starts.append(config)
        await asyncio.sleep(0)
        if len(starts) == 1:
            raise StackStartError("mcqa did not listen")
        return AloneStack(config, None, None)  # type: ignore[arg-type]

    monkeypatch.setattr("gymgate.integrations.training.rollouts.connect", connect)
    shared = RolloutRunner(ENTRY.stack, RolloutLimits())
    with caplog.at_level(logging.ERROR):
        told = await asyncio.gather(*(shared.start() for _ in range(64)), return_exceptions=True)
    assert {type(error) for error in told} == {StackStartError}
    (record,) = caplog.records
    assert record.message.endswith(": mcqa did not listen")
    stacks = await asyncio.gather(*(shared.start() for _ in range(64)))
    assert len(starts) == 2
    assert len({id(stack) for stack in stacks}) == 1


async def test_a_cancelled_rollout_leaves_the_start_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = asyncio.Event()

    async def connect(config: StackConfig, **_: Any) -> Stack:
        await let_go.wait()
        return AloneStack(config, None, None)  # type: ignore[arg-type]

    monkeypatch.setattr("gymgate.integrations.training.rollouts.connect", connect)
    shared = RolloutRunner(ENTRY.stack, RolloutLimits())
    first, second = (asyncio.create_task(shared.start()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    let_go.set()
    assert isinstance(await second, Stack)


async def test_one_policy_per_set_of_sampling_parameters() -> None:
    made = worker_of(ENTRY, object(), None, ROLLOUT)
    training = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    validation = {**training, "temperature": 0}
    policy = made.policy(training)
    assert made.policy(dict(training)) is policy
    assert made.policy(validation) is not policy
    assert policy.guard.apply({"temperature": 1.0, "max_tokens": 9})["temperature"] == 0.7
    assert made.policy(validation).guard.apply({"temperature": 1.0})["temperature"] == 0
    assert (policy.max_completion_len, policy.max_model_len) == (50, 150)


async def test_a_worker_is_one_per_entry_and_server_manager() -> None:
    manager = object()
    first = worker_of(ENTRY, manager, None, ROLLOUT)
    assert worker_of(LoopConfig.model_validate({"environments": "mcqa"}), manager, None, ROLLOUT) is first
    assert worker_of(ENTRY, object(), None, ROLLOUT) is not first
    assert (
        worker_of(LoopConfig.model_validate({"environments": "other"}), manager, None, ROLLOUT) is not first
    )
    assert len(_workers[asyncio.get_running_loop()]) == 3


def test_a_closed_loops_workers_are_let_go() -> None:
    async def make() -> Any:
        return worker_of(ENTRY, object(), None, ROLLOUT)

    first = asyncio.run(make())
    second = asyncio.run(make())
    assert first is not second
    kept = [worker for workers in worker_room._workers.values() for worker in workers.values()]
    assert first not in kept
