"""Servers with several workers: `num_workers` of a config, or set by the user."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import EnvironmentConfig
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire
from support.faulty import faulty
from support.stacks import (
    ROW,
    SESSIONS,
    all_gone,
    call_then_answer,
    pids_of,
    server_pid,
    stack_config,
)

pytestmark = [pytest.mark.gym, pytest.mark.warm, pytest.mark.timeout(300)]

AGENT, SERVER = f"{SESSIONS}_simple_agent", f"{SESSIONS}_resources_server"
SERVER_KEY = f"{SERVER}.resources_servers.{SESSIONS}.num_workers"
AGENT_KEY = f"{AGENT}.responses_api_agents.simple_agent.num_workers"


def with_workers(*overrides: tuple[str, int]) -> EnvironmentConfig:
    return EnvironmentConfig(name=SESSIONS, overrides=overrides)


def workers_of(status: dict[str, Any], server: str) -> dict[str, dict[str, Any]]:
    (environment,) = status["environments"].values()
    return {
        name: found for name, found in environment["servers"].items() if name.startswith(f"{server} worker ")
    }


async def run_together(stack: Stack, count: int) -> list[Rollout]:
    """Run rollouts none of which ends before all have asked their policy.

    In `SESSIONS` each scores 1 if its count, which the resources server keeps in memory, is still its own.
    """
    asked = asyncio.Barrier(count)

    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        answer = call_then_answer(body)
        if answer["output"][0]["type"] == "function_call":
            await asked.wait()
        return answer

    policy = stack.register("together", answer, dialect="responses")
    rows = [{**ROW, "initial_count": each, "expected_count": each} for each in range(1, count + 1)]
    return await asyncio.gather(*(stack.run(row, policy=policy) for row in rows))


@pytest.mark.parametrize("version", ["0.7.0", pytest.param("0.6.0", marks=pytest.mark.heavy)])
async def test_a_rollout_finds_its_session_in_one_of_several_workers(version: str) -> None:
    """The agent has as many workers as the resources server, without being asked to."""
    async with acquire(stack_config(with_workers((SERVER_KEY, 3)), version=version)) as stack:
        rollouts = await run_together(stack, 12)
        assert [(each.reward, each.error) for each in rollouts] == [(1.0, None)] * 12
        status = await stack.status()
        assert len(workers_of(status, SERVER)) == len(workers_of(status, AGENT)) == 3
    assert await all_gone(pids_of(status))


async def test_rollouts_are_spread_over_the_workers(tmp_path: Path) -> None:
    environment = faulty(tmp_path, num_workers=3)
    async with acquire(stack_config(environment, models={"judge_model": "none"})) as stack:
        used = Counter(tool_output(each)["pid"] for each in await run_together(stack, 6))
        workers = workers_of(await stack.status(), "faulty")
        assert used == dict.fromkeys((found["pid"] for found in workers.values()), 2)


def tool_output(rollout: Rollout) -> dict[str, Any]:
    assert rollout.result is not None, rollout.error
    items = rollout.result["response"]["output"]
    output: dict[str, Any] = json.loads(next(item["output"] for item in items if "output" in item))
    return output


@pytest.mark.parametrize("server", [SERVER, AGENT])
async def test_a_killed_worker_fails_its_environments_rollouts_and_comes_back(server: str) -> None:
    async with acquire(stack_config(with_workers((SERVER_KEY, 2)))) as stack:
        asked = asyncio.Event()

        async def silent(body: dict[str, Any]) -> dict[str, Any]:
            asked.set()
            await asyncio.Event().wait()
            return {}

        policy = stack.register("silent", silent, dialect="responses")
        running = asyncio.create_task(
            stack.run({**ROW, "initial_count": 1, "expected_count": 1}, policy=policy)
        )
        await asked.wait()
        before = await stack.status()
        victim = f"{server} worker 2"
        os.kill(server_pid(before, SESSIONS, victim), signal.SIGKILL)
        rollout = await asyncio.wait_for(running, 5)
        assert rollout.error is not None
        assert (rollout.error.type, rollout.error.server, rollout.reward) == (
            "ServerDiedError",
            victim,
            None,
        )
        assert "SIGKILL" in rollout.error.message
        again = await run_together(stack, 4)
        assert [each.reward for each in again] == [1.0] * 4
        after = await stack.status()
        assert after["environments"][SESSIONS]["generation"] == 2
        ports = [
            {name: found["port"] for name, found in status["environments"][SESSIONS]["servers"].items()}
            for status in (before, after)
        ]
        assert ports[0] == ports[1]
        assert await all_gone(set(pids_of(before)) - set(pids_of(after)))
    assert await all_gone(pids_of(after))


async def test_workers_of_a_daemon_that_is_killed_are_gone() -> None:
    async with acquire(stack_config(with_workers((AGENT_KEY, 3)))) as stack:
        status = await stack.status()
        assert len(workers_of(status, AGENT)) == 3
        assert not workers_of(status, SERVER)
        os.kill(status["pid"], signal.SIGKILL)
        assert await all_gone(pids_of(status))


async def test_a_server_that_can_have_one_worker_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = faulty(tmp_path, num_workers=4)
    code = tmp_path / "resources_servers" / "faulty" / "app.py"
    refusal = 'if self.config.num_workers not in (None, 1):\n            raise ValueError("one worker only")'
    setup = "def setup_webserver(self):\n        "
    code.write_text(code.read_text().replace(setup, f"{setup}{refusal}\n        "))
    models = ("judge_model.responses_api_models.openai_model.num_workers", 16)
    environment = environment.model_copy(update={"overrides": (*environment.overrides, models)})
    config = stack_config(environment, models={"judge_model": "none"})
    with caplog.at_level(logging.WARNING):
        async with acquire(config) as stack:
            (rollout,) = await run_together(stack, 1)
            assert rollout.reward == 0.5
    told = [record.getMessage() for record in caplog.records if "num_workers" in record.getMessage()]
    assert len(told) == 2
    assert "faulty.resources_servers.faulty.num_workers=4 " in told[0]
    assert "num_workers=16 " in told[1]
