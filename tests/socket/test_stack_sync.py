"""`SyncStack` offers what `Stack` does, to plain threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_stack_sessions import ENDPOINT, joined

from gymgate.errors import StackLostError
from gymgate.rollout import Rollout
from gymgate.stack import OpenRoute, Stack, SyncOpenRoute, SyncStack
from gymgate.stack.sync import LoopThread
from support.upstream import chat_answer


def offered(cls: type[Any]) -> dict[str, list[tuple[str, Any, Any]]]:
    """Parameters (name, kind, default) of each public method, by name."""
    methods = {name: value for name, value in vars(cls).items() if inspect.isfunction(value)}
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(value).parameters.values()]
        for name, value in methods.items()
        if not name.startswith("_")
    }


def names(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize(("cls", "sync"), [(Stack, SyncStack), (OpenRoute, SyncOpenRoute)])
def test_the_blocking_class_has_the_same_methods_with_the_same_parameters(
    cls: type[Any], sync: type[Any]
) -> None:
    assert offered(sync) == offered(cls)


@contextmanager
def sync_stack(directory: Path) -> Iterator[SyncStack]:
    loop, context = LoopThread(), joined(directory)
    loop.enter()
    try:
        stack, _, _ = loop.call(context.__aenter__())
        try:
            yield SyncStack(stack, loop)
        finally:
            loop.call(context.__aexit__(None, None, None))
    finally:
        loop.leave()


def ask(base_url: str) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{base_url}/chat/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def says(text: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: chat_answer(text)


def test_a_thread_opens_a_route_and_registers_a_callable(tmp_path: Path) -> None:
    with sync_stack(tmp_path) as stack:
        assert names(stack) == names(stack._async)
        with stack.open_route(says("alone"), rollout_id="mine") as route:
            assert names(route) == names(route._async)
            assert route.rollout_id == "mine"
            assert ask(route.base_url) == "alone"
            assert [call.status_code for call in route.calls()] == [200]
        with pytest.raises(Exception, match="no open route"):
            route.calls()
        named = stack.register("named", says("by name"))
        with stack.open_route(named, record_bodies=False) as route:
            assert ask(route.base_url) == "by name"
            assert route.calls()[0].request is None
        stack.close()
        with pytest.raises(StackLostError, match="closed"):
            stack.status()


def test_a_threads_rollout_takes_a_judge_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    async def run(self: Stack, row: Any, **given: Any) -> Rollout:
        seen.update(given)
        return Rollout(id="r", environment="e", agent="a", status="completed", reward=1.0)

    monkeypatch.setattr(Stack, "run", run)
    with sync_stack(tmp_path) as stack:
        assert stack.run({}, policy=ENDPOINT, judge_policy=ENDPOINT).reward == 1.0
    assert seen["judge_policy"] is ENDPOINT
