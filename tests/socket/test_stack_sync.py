"""`SyncStack` and its loop: a stack for plain threads."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_stack_sessions import ENDPOINT, ROW, joined, serving

from gymgate.core.config import RayCluster, StackConfig
from gymgate.core.errors import ConfigError, StackLostError
from gymgate.stack import SyncStack, acquire_sync, sync
from gymgate.stack.sync import LoopThread
from support.upstream import chat_answer, responses_answer


@contextmanager
def sync_stack(directory: Path) -> Iterator[SyncStack]:
    contexts = [serving(directory), joined(directory)]
    with LoopThread() as loop:
        loop.call(contexts[0].__aenter__())
        stack = loop.call(contexts[1].__aenter__())
        try:
            yield SyncStack(stack, loop)  # type: ignore[arg-type]
        finally:
            for context in reversed(contexts):
                loop.call(context.__aexit__(None, None, None))


def test_threads_run_rows_and_ask_the_stack(tmp_path: Path) -> None:
    with sync_stack(tmp_path) as stack, ThreadPoolExecutor(4) as pool:
        kept = stack.stack.register("kept", lambda body: responses_answer("by name"), dialect="responses")
        rollouts = pool.map(lambda _: stack.run(ROW, policy=kept, environment="scripted"), range(8))
        assert ["by name" in str(rollout.result) for rollout in rollouts] == [True] * 8
        alone = stack.run(ROW, policy=lambda body: chat_answer("alone"), rollout_id="mine")
        assert (alone.id, alone.reward) == ("mine", 1.0)
        assert stack.call(stack.stack.status())["rollouts"] == 0
        with pytest.raises(ConfigError):
            stack.run(ROW, policy=ENDPOINT, environment="another")
        with pytest.raises(TypeError):
            pickle.dumps(stack)
        stack.call(stack.stack.close())
        with pytest.raises(StackLostError):
            stack.call(stack.stack.status())


def test_where_a_stack_is_to_be_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def connect(config: StackConfig, **fields: Any) -> Any:
        asked.append(fields["where"])

        async def close() -> None:
            pass

        return SimpleNamespace(close=close)

    monkeypatch.setattr(sync, "connect", connect)
    with acquire_sync(StackConfig(environments=("mcqa",)), where=RayCluster()):
        assert asked == [RayCluster()]


def test_a_forked_child_is_told_that_the_loop_is_its_parents() -> None:
    code = """
import os
from gymgate.core.errors import StackLostError
from gymgate.stack.sync import LoopThread

async def work():
    return 1

loop = LoopThread()
assert loop.call(work()) == 1
if (pid := os.fork()) == 0:
    try:
        loop.call(work())
    except StackLostError:
        os._exit(0)
    os._exit(1)
assert os.waitpid(pid, 0)[1] == 0
loop.stop()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
