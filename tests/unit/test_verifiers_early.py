"""The stack that starts while verifiers is imported: which one, and when its lease ends."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gymgate.core.config import StackConfig
from gymgate.core.errors import StackStartError
from gymgate.integrations import stacks
from gymgate.integrations.verifiers.taskset import NeMoGymConfig

WAIT_S = 30.0


class FakeStacks:
    """Replaces `acquire`: which leases are held, and which were given back."""

    def __init__(self) -> None:
        self.held: list[StackConfig] = []
        self.taken, self.given_back = threading.Event(), threading.Event()
        self.fails = False

    @asynccontextmanager
    async def acquire(self, config: StackConfig, *, progress: Any) -> AsyncIterator[None]:
        self.held.append(config)
        self.taken.set()
        try:
            if self.fails:
                raise StackStartError("no")
            yield
        finally:
            self.held.remove(config)
            self.given_back.set()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStacks:
    fake = FakeStacks()
    monkeypatch.setattr(stacks, "acquire", fake.acquire)
    return fake


CONFIG = NeMoGymConfig(env="mcqa").run_spec().stack


def test_it_is_held_while_the_eval_runs(fake: FakeStacks) -> None:
    """So the eval finds it up, or joins its start, and its end waits for the stack's."""
    with stacks.starting_early(CONFIG, print):
        assert fake.taken.wait(WAIT_S)
        assert fake.held == [CONFIG]
    assert fake.held == []


def test_it_ends_with_an_eval_that_fails(fake: FakeStacks) -> None:
    def evaluate() -> None:
        with stacks.starting_early(CONFIG, print):
            assert fake.taken.wait(WAIT_S)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate()
    assert fake.held == []


def test_a_start_that_fails_is_left_to_the_eval_to_tell(fake: FakeStacks) -> None:
    fake.fails = True
    with stacks.starting_early(CONFIG, print):
        assert fake.given_back.wait(WAIT_S)
