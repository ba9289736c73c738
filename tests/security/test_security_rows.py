"""Rows that mean harm: each is refused with one line or comes back as a rollout, and the stack serves on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.errors import ConfigError, DataError
from gymgate.stack import Stack, acquire
from support.stacks import ROW, SIMPLE, call_then_answer, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.warm]

SIZE = 100_000_000
INJECTION = "a\r\nX-Evil: 1\r\n\r\nGET / HTTP/1.1\r\n"


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def changed(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy(ROW) | fields


def asked(**fields: Any) -> dict[str, Any]:
    row = copy.deepcopy(ROW)
    row["responses_create_params"] |= fields
    return row


REFUSED: dict[str, Callable[[], dict[str, Any]]] = {
    "an agent by path": lambda: changed(agent_ref={"name": "../../../etc/passwd"}),
    "an agent with a line break": lambda: changed(agent_ref={"name": INJECTION}),
    "parameters of another kind": lambda: changed(responses_create_params=["x"]),
    "no parameters": lambda: {"input": "x"},
    "nesting without end": lambda: changed(extra=nested(100_000)),
    "a number that JSON has not": lambda: changed(extra={1: {2}}),
}
SERVED: dict[str, Callable[[], dict[str, Any]]] = {
    "metadata with headers in it": lambda: asked(metadata={"x": INJECTION, INJECTION: "x"}),
    "control characters": lambda: asked(input="\x00\x01\x1b[31m\u202e \x7f"),
    "Gym's own fields": lambda: changed(_ng_rollout_id="f" * 32, _ng_attempt_index=7, ng_trajectory={}),
    "another rollout's endpoint": lambda: changed(policy_base_url="http://192.0.2.1/", policy_api_key="x"),
    "half a surrogate pair": lambda: asked(input="\ud83d"),
    "NaN": lambda: changed(extra=float("nan")),
    "names that are paths": lambda: changed(
        **{"../../../tmp/evil": "x", "id": "../../evil", "uuid": "/evil"}
    ),
    "five megabytes": lambda: asked(input="x" * 5_000_000),
    "deep nesting": lambda: changed(extra=nested(200)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


async def serves(stack: Stack) -> None:
    policy = stack.register("scripted", call_then_answer, dialect="responses")
    rollout = await stack.run(ROW, policy=policy, environment=SIMPLE)
    assert (rollout.reward, rollout.error) == (1.0, None)


async def test_hostile_rows_are_refused_or_served_as_data(directory: Path) -> None:
    async with acquire(stack_config(state_dir=str(directory))) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        for name, make in REFUSED.items():
            with pytest.raises((ConfigError, DataError)) as refused:
                await stack.run(make(), policy=policy)
            assert "\n" not in str(refused.value), name
            assert "\r" not in str(refused.value), name
            assert len(str(refused.value)) < 2000, name
        for name, make in SERVED.items():
            rollout = await stack.run(make(), policy=policy)
            assert (rollout.reward, rollout.error) == (1.0, None), name
        await serves(stack)
    assert_no_file_named("evil", directory)


@pytest.mark.heavy
async def test_a_row_of_100_mb_is_served() -> None:
    """Whole; and then one of the usual size, by the same servers."""
    async with acquire(stack_config()) as stack:
        seen: list[int] = []

        def policy(body: dict[str, Any]) -> dict[str, Any]:
            seen.append(len(str(body["input"])))
            return call_then_answer(body)

        endpoint = stack.register("big", policy, dialect="responses")
        rollout = await stack.run(asked(input="x" * SIZE), policy=endpoint, record_bodies=False)
        assert (rollout.reward, rollout.error) == (1.0, None)
        assert len(seen) == 2
        assert min(seen) >= SIZE
        await serves(stack)


async def test_a_rollouts_id_is_only_a_name(directory: Path) -> None:
    async with acquire(stack_config(state_dir=str(directory))) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        for rollout_id in ("../../evil", '"evil\\', "x" * 256):
            rollout = await stack.run(ROW, policy=policy, rollout_id=rollout_id)
            assert (rollout.id, rollout.reward) == (rollout_id, 1.0)
        for rollout_id in (INJECTION, "x" * 257, "\x00"):
            with pytest.raises(ConfigError, match="rollout_id"):
                await stack.run(ROW, policy=policy, rollout_id=rollout_id)
    assert_no_file_named("evil", directory)


def assert_no_file_named(text: str, directory: Path) -> None:
    assert not any(text in path.name for path in [*directory.rglob("*"), *directory.parent.iterdir()])
