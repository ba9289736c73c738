"""The stack that starts while verifiers is imported: which one, and when its lease ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gymgate.cli.eval_args import read_settings
from gymgate.config import StackConfig
from gymgate.errors import ConfigError, StackStartError
from gymgate.integrations import stacks
from gymgate.integrations.verifiers.knobs import knobs_of
from gymgate.integrations.verifiers.taskset import NeMoGymConfig

WAIT_S = 30.0


@pytest.mark.parametrize(
    ("argv", "knobs"),
    [
        ([], {}),
        (["--env.taskset.env", "mcqa,calendar", "-r", "3"], {"env": "mcqa,calendar"}),
        (
            [
                *(
                    "--env.taskset.env=mcqa",
                    "--env.taskset.agent-processes",
                    "8",
                    "--env.taskset.linger-s",
                    "2.5",
                ),
                *("--env.taskset.share", "machine", "--env.taskset.hang-timeout-s", "None"),
                *("--env.taskset.models.judge", "http://h/v1", "--env.taskset.overrides.a.b", "[1, 2]"),
                *("--env.taskset.system-prompt", "x.txt", "--env.agent.max-turns", "3"),
            ],
            {
                **{
                    "env": "mcqa",
                    "agent_processes": 8,
                    "linger_s": 2.5,
                    "share": "machine",
                    "hang_timeout_s": None,
                },
                **{"models": {"judge": "http://h/v1"}, "overrides": {"a.b": "[1, 2]"}},
            },
        ),
    ],
)
def test_the_settings_give_the_stack_that_the_taskset_will_ask_for(
    argv: list[str], knobs: dict[str, Any]
) -> None:
    assert knobs_of(read_settings(argv)).stack_config() == NeMoGymConfig(**knobs).stack_config()


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


CONFIG = NeMoGymConfig(env="mcqa").stack_config()


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
        await stacks._connect(NeMoGymConfig(env="calendar").stack_config(), print)
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


def test_a_wrong_setting_is_one_line_that_names_it() -> None:
    with pytest.raises(
        ConfigError, match=r"^--env\.taskset\.agent_processes: Input should be a valid integer"
    ):
        knobs_of({"env.taskset.agent_processes": "many"})


def test_lists_and_mappings_may_be_json() -> None:
    knobs = knobs_of(
        {
            "env.taskset.models": '{"my-judge": "policy"}',
            "env.taskset.env_vars": "A,B",
            "env.taskset.component_roots": '["x"]',
        }
    )
    assert (knobs.models, knobs.env_vars, knobs.component_roots) == (
        {"my-judge": "policy"},
        ["A", "B"],
        ["x"],
    )
