"""The stack that starts while verifiers is imported: which one, and when its lease ends."""

from __future__ import annotations

import asyncio
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
    """Replaces `acquire` and `connect`: which leases are held, and which were given back."""

    def __init__(self) -> None:
        self.held: list[StackConfig] = []
        self.taken, self.given_back = threading.Event(), threading.Event()
        self.fails = False
        self.held_at_connect: list[StackConfig] = []

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

    async def connect(self, config: StackConfig, *, progress: Any, reconnect: bool) -> None:
        """The eval's own lease, which outlives the loss of its stack."""
        assert reconnect
        if config != CONFIG:  # another stack than the early one, which is released first
            assert await asyncio.to_thread(self.given_back.wait, WAIT_S)
        self.held_at_connect = [*self.held]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStacks:
    fake = FakeStacks()
    monkeypatch.setattr(stacks, "acquire", fake.acquire)
    monkeypatch.setattr(stacks, "connect", fake.connect)
    return fake


CONFIG = NeMoGymConfig(env="mcqa").run_spec().stack


async def test_it_is_held_until_the_eval_has_its_own_lease(fake: FakeStacks) -> None:
    with stacks.starting_early(CONFIG, print):
        assert fake.taken.wait(WAIT_S)
        await stacks._connect(CONFIG, print)
        assert fake.held_at_connect == [CONFIG]
        assert fake.given_back.wait(WAIT_S)
    assert fake.held == []


async def test_another_stack_than_the_eval_asks_for_ends_at_once(fake: FakeStacks) -> None:
    with stacks.starting_early(CONFIG, print):
        assert fake.taken.wait(WAIT_S)
        await stacks._connect(NeMoGymConfig(env="calendar").run_spec().stack, print)
        assert fake.held_at_connect == []


async def test_it_ends_with_an_eval_that_never_asks(fake: FakeStacks) -> None:
    with stacks.starting_early(CONFIG, print):
        assert fake.taken.wait(WAIT_S)
    assert fake.held == []
    await stacks._connect(CONFIG, print)


async def test_a_start_that_fails_is_left_to_the_eval_to_tell(fake: FakeStacks) -> None:
    fake.fails = True
    with stacks.starting_early(CONFIG, print):
        assert fake.given_back.wait(WAIT_S)
        await stacks._connect(CONFIG, print)
