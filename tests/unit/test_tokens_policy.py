"""What surrounds an engine: the trainer's sampling parameters, the gate of a pause, resumption after an abort."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from gymgate.core.errors import PolicyError
from gymgate.tokens.engines import CallableEngine, Sample
from gymgate.tokens.sampling import (
    MAX_RESUMES,
    Gate,
    SamplingGuard,
    join,
    requested_sampling,
    sample_resuming,
)


def test_the_trainers_parameters_win_and_a_mismatch_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = SamplingGuard({"temperature": 1.0, "top_p": 0.9, "max_tokens": 100, "min_p": None})
    wanted = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 10, "stop": ["x"]}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert guard.apply(wanted)["temperature"] == 1.0
    merged = guard.apply(wanted)
    assert (merged["max_tokens"], merged["stop"], merged["top_p"]) == (10, ["x"], 0.9)
    assert guard.overruled == {"temperature"}
    assert len(caplog.records) == 1


def test_what_the_trainer_does_not_pin_is_neutral(caplog: pytest.LogCaptureFixture) -> None:
    """A row's min_p would be off-policy without the trainer's knowledge; its seed, the same for a whole group."""
    guard = SamplingGuard({"temperature": 1.0, "top_k": 0})
    asked = {"min_p": 0.3, "presence_penalty": 0.5, "frequency_penalty": 0.0, "top_k": -1, "seed": 3}
    merged = guard.apply(asked)
    assert merged == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    assert guard.overruled == {"min_p", "presence_penalty", "seed"}


def test_a_neutral_temperature_is_sent() -> None:
    """An engine takes one that is not from the model's generation_config.json."""
    assert SamplingGuard({"top_p": 0.9}).apply({"temperature": 0.2})["temperature"] == 1.0


def test_without_a_trainer_the_row_decides() -> None:
    assert SamplingGuard({}).apply({"temperature": 0.2, "min_p": 0.1}) == {"temperature": 0.2, "min_p": 0.1}


def test_a_requests_parameters_are_read_under_either_name() -> None:
    request = {
        "max_completion_tokens": 5,
        "max_tokens": 9,
        "temperature": 0,
        "top_p": None,
        "model": "m",
        "logit_bias": {"3": 1},
    }
    assert requested_sampling(request) == {"max_tokens": 5, "temperature": 0, "logit_bias": {"3": 1}}


@pytest.mark.parametrize(
    ("name", "value"), [("top_k", "20"), ("max_tokens", "8"), ("temperature", [1]), ("seed", True)]
)
def test_a_parameter_that_is_no_number_is_the_requests_fault(name: str, value: Any) -> None:
    """As an endpoint would refuse it: neither a fault of the engine nor worth another attempt."""
    with pytest.raises(PolicyError, match=name) as raised:
        requested_sampling({name: value, "stop": ["x"]})
    assert (raised.value.status_code, raised.value.retryable) == (400, False)


async def test_a_closed_gate_holds_newcomers_and_lets_those_inside_finish() -> None:
    gate, entered, finish = Gate(), asyncio.Event(), asyncio.Event()
    order: list[str] = []

    async def call(name: str) -> None:
        async with gate.passing():
            order.append(f"{name} in")
            entered.set()
            await finish.wait()
            order.append(f"{name} out")

    first = asyncio.create_task(call("first"))
    await entered.wait()
    closing = asyncio.create_task(asyncio.to_thread(gate.close, 30.0))
    while not gate._closed:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert gate.close() == 1
    second = asyncio.create_task(call("second"))
    await asyncio.sleep(0)
    finish.set()
    await first
    assert await closing == 0
    assert order == ["first in", "first out"]
    threading.Thread(target=gate.open).start()
    await second
    assert order[2:] == ["second in", "second out"]
    assert gate.inside == 0


async def test_a_cancelled_caller_leaves_the_gate() -> None:
    gate = Gate()
    gate.close()

    async def call() -> None:
        async with gate.passing():
            raise AssertionError("the gate is closed")

    waiting = asyncio.create_task(call())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open()
    assert gate.close(0.0) == 0


async def test_an_aborted_sample_is_taken_up_where_it_ended() -> None:
    """Two ids under version 3, a weight update, two more under version 4."""
    seen: list[tuple[list[int], int]] = []

    def engine(prompt_ids: list[int], sampling: dict[str, Any]) -> Sample:
        seen.append((prompt_ids, sampling["max_tokens"]))
        if len(seen) == 1:
            return Sample([7, 8], [-0.1, -0.2], "abort", (3, 3))
        return Sample([9, 2], [-0.3, -0.4], "stop", (4, 4))

    sample = await sample_resuming(CallableEngine(engine), Gate(), [1], {"max_tokens": 6}, session="s")
    assert sample == Sample([7, 8, 9, 2], [-0.1, -0.2, -0.3, -0.4], "stop", (3, 4))
    assert seen == [([1], 6), ([1, 7, 8], 4)]


async def test_an_abort_at_the_last_id_is_a_full_length() -> None:
    engine = CallableEngine(lambda ids, sampling: Sample([7], None, "abort"))
    sample = await sample_resuming(engine, Gate(), [1], {"max_tokens": 1}, session="s")
    assert sample == Sample([7], None, "length")


async def test_an_engine_that_always_aborts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gymgate.tokens.sampling._WAIT_S", (0.0, 0.0))
    engine = CallableEngine(lambda ids, sampling: Sample([], None, "abort"))
    with pytest.raises(PolicyError, match=f"{MAX_RESUMES} times"):
        await sample_resuming(engine, Gate(), [1], {}, session="s")


async def test_versions_are_stamped_around_an_engine_that_gives_none() -> None:
    weights = iter([4, 5])
    engine = CallableEngine(lambda ids, sampling: Sample([7], None, "stop"))
    sample = await sample_resuming(engine, Gate(), [1], {}, session="s", version=lambda: next(weights))
    assert sample.policy_version == (4, 5)


def test_one_part_without_logprobs_leaves_none() -> None:
    with_them, without = Sample([1], [-0.5], "abort"), Sample([2], None, "stop")
    assert join(with_them, without).logprobs is None
    assert join(Sample([], None, "abort"), with_them).logprobs == [-0.5]
