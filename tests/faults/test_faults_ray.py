"""kill -9 of what the Ray of a stack consists of: its servers start again with another one, and nothing of either stays."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.config import RolloutLimits
from gymgate.gym.catalog import Catalog
from gymgate.gym.inside.forkserver import descendants
from gymgate.gym.row_sources import open_rows
from gymgate.gym.runtime import ensure_runtime
from gymgate.rollouts import Rollout
from gymgate.stack import Stack, acquire
from support.stacks import all_gone, pids_of, server_pid, stack_config

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(600)]

PLACE = "code_gen"
LIMITS = RolloutLimits(timeout_s=120)


def writes_code(body: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": "```python\nprint(1)\n```"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


def of_ray(daemon: int, name: str) -> int:
    """A process of the stack's Ray."""
    return next(pid for pid in descendants(daemon) if Path(f"/proc/{pid}/comm").read_text().strip() == name)


async def scored(stack: Stack, row: dict[str, Any]) -> Rollout:
    return await stack.run(row, policy=writes_code, limits=LIMITS)


async def test_a_dead_ray_is_replaced() -> None:
    config = stack_config(PLACE, start_timeout_s=120, max_restarts=10)
    runtime = await asyncio.to_thread(ensure_runtime, config.runtime)
    environment = Catalog(runtime.site, runtime.version).find(PLACE)
    row = open_rows("example", environment=environment)[0].data
    async with acquire(config) as stack:
        assert (await scored(stack, row)).reward == 0.0
        for generation, victim in enumerate(("raylet", "gcs_server", "fork server", PLACE), start=2):
            status = await stack.status()
            pids = {
                "fork server": status["fork_servers"][0],
                PLACE: server_pid(status, PLACE, PLACE),
            }
            os.kill(pids.get(victim) or of_ray(status["pid"], victim), signal.SIGKILL)
            while (place := (await stack.status())["environments"][PLACE])["restarts"] < generation - 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            rollout = await scored(stack, row)
            assert (rollout.reward, rollout.error) == (0.0, None), victim
            assert place["restarts"] == generation - 1, victim
        status = await stack.status()
        pids = [*pids_of(status), *descendants(status["pid"])]
        os.kill(status["pid"], signal.SIGKILL)
        assert await all_gone(pids)
