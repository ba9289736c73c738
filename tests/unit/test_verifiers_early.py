"""The stack that starts while verifiers is imported: which one, and when its lease ends."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gymgate.cli.eval_args import read_settings
from gymgate.config import StackConfig
from gymgate.errors import StackStartError
from gymgate.integrations.verifiers import early
from gymgate.integrations.verifiers.config import NeMoGymConfig

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
    assert early.knobs_of(read_settings(argv)).stack_config() == NeMoGymConfig(**knobs).stack_config()


class Stacks:
    """Stands in for `acquire`: what is held, and what was given back."""

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
def stacks(monkeypatch: pytest.MonkeyPatch) -> Stacks:
    stacks = Stacks()
    monkeypatch.setattr(early, "acquire", stacks.acquire)
    return stacks


SETTINGS = {"env.taskset.env": "mcqa"}
CONFIG = NeMoGymConfig(env="mcqa").stack_config()


def test_it_is_held_until_the_eval_has_its_own_lease(stacks: Stacks) -> None:
    with early.starting(SETTINGS, print):
        assert stacks.taken.wait(WAIT_S)
        early.acquiring(CONFIG)
        assert stacks.held == [CONFIG]
        early.acquired()
        assert stacks.given_back.wait(WAIT_S)
    assert stacks.held == []


def test_another_stack_than_the_eval_asks_for_ends_at_once(stacks: Stacks) -> None:
    with early.starting(SETTINGS, print):
        assert stacks.taken.wait(WAIT_S)
        early.acquiring(NeMoGymConfig(env="calendar").stack_config())
        assert stacks.given_back.wait(WAIT_S)


def test_it_ends_with_an_eval_that_never_asks(stacks: Stacks) -> None:
    with early.starting(SETTINGS, print):
        assert stacks.taken.wait(WAIT_S)
    assert stacks.held == []
    early.acquiring(CONFIG)
    early.acquired()


def test_a_start_that_fails_is_left_to_the_eval_to_tell(stacks: Stacks) -> None:
    stacks.fails = True
    with early.starting(SETTINGS, print):
        assert stacks.given_back.wait(WAIT_S)
        early.acquired()


def test_settings_that_verifiers_will_refuse_start_nothing(stacks: Stacks) -> None:
    with early.starting({"env.taskset.agent_processes": "many"}, print):
        assert stacks.held == []
    assert not stacks.taken.is_set()
