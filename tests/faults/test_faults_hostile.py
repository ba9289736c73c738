"""Answers, callables and requests made to break the connection: each fails its own call and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gymgate.core.config import HTTPEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import DataError
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire, acquire_sync
from support.ledger import daemon_of, held, idle
from support.stacks import ROW, call_then_answer, stack_config
from support.upstream import Seen, upstream

pytestmark = pytest.mark.gym

LIMITS = RolloutLimits(timeout_s=30)
HALF = "\ud83d"


def chat(content: Any = "hi", **extra: Any) -> dict[str, Any]:
    """A chat-completions answer."""
    message = {"role": "assistant", "content": content}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], **extra}


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def raises(error: BaseException) -> Callable[[Any], Any]:
    def policy(body: Any) -> Any:
        raise error

    return policy


async def cancels(body: Any) -> Any:
    raise asyncio.CancelledError


async def exits(body: Any) -> Any:
    raise SystemExit(3)


def circular(body: Any) -> Any:
    answer = chat()
    answer["again"] = answer
    return answer


ANSWERS: dict[str, tuple[int, bytes, str]] = {
    "half a character": (200, json.dumps(chat(f"x{HALF}")).encode(), "completed"),
    "half a character in an error": (400, json.dumps({"error": {"message": HALF}}).encode(), "failed"),
    "nested": (200, json.dumps(chat(extra=nested(300))).encode(), "failed"),
    "nested beyond any parser": (200, b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "failed"),
    "NaN": (200, json.dumps(chat(extra=float("nan"))).encode(), "completed"),
    "an integer of 71 bits": (200, json.dumps(chat(extra=2**70)).encode(), "completed"),
    "another type everywhere": (200, b'{"choices": {"0": []}, "usage": [], "id": {}}', "failed"),
    "content of numbers": (200, json.dumps(chat([1, 2, {"a": None}])).encode(), "completed"),
    "no text": (200, b"\xff\xfe\x00", "failed"),
}
CALLABLES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "half a character": (lambda body: chat(f"x{HALF}"), "completed"),
    "integer keys": (lambda body: chat(extra={1: 2}), "completed"),
    "an integer of 71 bits": (lambda body: chat(extra=2**70), "completed"),
    "nested": (lambda body: chat(extra=nested(300)), "failed"),
    "nested beyond any writer": (lambda body: chat(extra=nested(100_000)), "failed"),
    "circular": (circular, "failed"),
    "an object": (lambda body: chat(extra=object()), "failed"),
    "SystemExit": (raises(SystemExit(1)), "failed"),
    "KeyboardInterrupt": (raises(KeyboardInterrupt()), "failed"),
    "GeneratorExit": (raises(GeneratorExit()), "failed"),
    "StopIteration": (raises(StopIteration()), "failed"),
    "half a character in an exception": (raises(ValueError(HALF)), "failed"),
    "an exception without words": (
        raises(type("Mute", (Exception,), {"__str__": lambda self: 1})()),
        "failed",
    ),
    "CancelledError": (cancels, "failed"),
    "SystemExit in a coroutine": (exits, "failed"),
}


@contextlib.asynccontextmanager
async def hostile_server() -> AsyncIterator[str]:
    """Serves `ANSWERS`, the one whose number stands in the path."""

    async def answer(seen: Seen) -> web.Response:
        status, body, _ = list(ANSWERS.values())[int(seen.path.split("/")[1])]
        return web.Response(status=status, body=body, content_type="application/json")

    async with upstream(answer) as serving:
        yield serving.url.removesuffix("/v1")


@pytest.fixture(scope="module")
def shared() -> Iterator[StackConfig]:
    """The config of a stack that stays up beside these tests."""
    with held(stack_config()):
        yield stack_config()


def check(rollout: Rollout, status: str) -> None:
    assert rollout.status == status, rollout.error
    assert (rollout.reward is None) == (status == "failed")
    if status == "failed":
        assert rollout.error is not None
        assert rollout.error.kind == "policy"
    rollout.model_dump_json().encode()


async def all_beside_good_ones(stack: Stack, hostile: list[tuple[Any, str, str]]) -> None:
    """Run every hostile policy at once, beside rollouts whose policy waits for all of them: none of those is harmed."""
    ended = asyncio.Event()

    async def patient(body: dict[str, Any]) -> dict[str, Any]:
        await ended.wait()
        return call_then_answer(body)

    endpoint = stack.register("patient", patient, dialect="responses")
    good = [asyncio.create_task(stack.run(ROW, policy=endpoint, limits=LIMITS)) for _ in range(5)]
    runs = [stack.run(ROW, policy=policy, limits=LIMITS) for policy, _, _ in hostile]
    rollouts = await asyncio.gather(*runs)
    for rollout, (_, status, name) in zip(rollouts, hostile, strict=True):
        assert rollout.status == status, (name, rollout.error)
        check(rollout, status)
    ended.set()
    assert [rollout.reward for rollout in await asyncio.gather(*good)] == [1.0] * 5
    await idle(stack)


async def test_hostile_answers_fail_their_own_rollout(shared: StackConfig) -> None:
    async with hostile_server() as url, acquire(shared) as stack:
        hostile = [
            (HTTPEndpoint(base_url=f"{url}/{number}/v1", max_retries=0), status, name)
            for number, (name, (_, _, status)) in enumerate(ANSWERS.items())
        ]
        await all_beside_good_ones(stack, hostile)


async def test_hostile_callables_fail_their_own_rollout(shared: StackConfig) -> None:
    async with acquire(shared) as stack:
        hostile = [(policy, status, name) for name, (policy, status) in CALLABLES.items()]
        await all_beside_good_ones(stack, hostile)


async def test_rows_are_checked_before_they_are_sent(shared: StackConfig) -> None:
    async with acquire(shared) as stack:
        for row in (
            {**ROW, "x": object()},
            {**ROW, "x": nested(50_000)},
            {},
            {"responses_create_params": {}},
        ):
            with pytest.raises(DataError):
                await stack.run(row, policy=call_then_answer)
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        rollout = await stack.run({**ROW, "note": f"x{HALF}"}, policy=policy)
        assert rollout.reward == 1.0
        assert rollout.result is not None
        assert rollout.result.get("note", "x\ufffd") == "x\ufffd"


JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(), max_size=8) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from(["id", "created", "model", "choices", "usage", "extra", "error", "object"])


def test_arbitrary_answers_and_rows_come_to_an_end(shared: StackConfig) -> None:
    """Through a real daemon, in both directions."""
    with acquire_sync(shared) as stack:

        @settings(max_examples=60, suppress_health_check=list(HealthCheck))
        @given(st.dictionaries(FIELDS, JSONISH, max_size=2), JSONISH, JSONISH)
        def drive(fields: dict[str, Any], content: Any, note: Any) -> None:
            rollout = stack.run(
                {**ROW, "note": note}, policy=lambda body: {**chat(content), **fields}, limits=LIMITS
            )
            assert rollout.status in ("completed", "failed", "truncated")
            assert rollout.status != "failed" or rollout.error is not None
            rollout.model_dump_json().encode()

        drive()
        status = stack.call(stack.stack.status())
        assert (status["rollouts"], status["calls"]) == (0, {})


async def test_callers_of_a_stopped_daemon_hear_at_their_deadline() -> None:
    """Each of them, long before the daemon is found to hang; afterwards it serves on."""
    async with acquire(stack_config(linger_s=0)) as stack:
        asked, gate = asyncio.Event(), asyncio.Event()

        async def policy(body: dict[str, Any]) -> dict[str, Any]:
            asked.set()
            await gate.wait()
            return call_then_answer(body)

        endpoint = stack.register("patient", policy, dialect="responses")
        started = time.monotonic()
        limits = RolloutLimits(timeout_s=3)
        running = [asyncio.create_task(stack.run(ROW, policy=endpoint, limits=limits)) for _ in range(10)]
        await asked.wait()
        daemon = daemon_of(os.getpid())
        assert daemon is not None
        os.kill(daemon, signal.SIGSTOP)
        try:
            rollouts = await asyncio.wait_for(asyncio.gather(*running), 20)
            took_s = time.monotonic() - started
        finally:
            os.kill(daemon, signal.SIGCONT)
        assert 3 <= took_s < 5
        for rollout in rollouts:
            assert rollout.error is not None
            assert (rollout.status, rollout.error.kind) == ("failed", "timeout")
        gate.set()
        await idle(stack, 10)
        assert (await stack.run(ROW, policy=endpoint)).reward == 1.0


async def test_a_policy_that_loops_is_bounded_in_calls_memory_and_time(shared: StackConfig) -> None:
    """It calls the tool for ever: the record grows with the conversation, not with its square, and comes in time."""

    def loops(body: dict[str, Any]) -> dict[str, Any]:
        return call_then_answer({**body, "input": []})

    async with acquire(shared) as stack:
        policy = stack.register("loops", loops, dialect="responses")
        rollout = await stack.run(
            ROW, policy=policy, limits=RolloutLimits(timeout_s=60, max_calls=60), record_bodies=True
        )
        assert (rollout.status, rollout.limit, len(rollout.policy_calls)) == ("truncated", "max_calls", 60)
        requests = [call.request for call in rollout.policy_calls]
        assert [len(request["input"]) for request in requests if request] == [1 + 2 * n for n in range(60)]
        daemon = (await stack.status())["pid"]
        before = resident_mb(daemon)
        limits = RolloutLimits(timeout_s=6, max_calls=None)
        started = time.monotonic()
        looping = [asyncio.create_task(stack.run(ROW, policy=policy, limits=limits)) for _ in range(4)]
        rollouts = await asyncio.gather(*looping)
        assert time.monotonic() - started < limits.timeout_s + 2
        assert all(rollout.error and rollout.error.kind == "timeout" for rollout in rollouts)
        assert min(len(rollout.calls) for rollout in rollouts) > 20
        assert resident_mb(daemon) - before < 150


def resident_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
