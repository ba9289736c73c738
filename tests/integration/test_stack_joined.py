"""A stack that one process holds and others join by the path of its socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gymgate.core.config import StackConfig
from gymgate.core.errors import ConfigError, StackLostError
from gymgate.stack import SyncStack, acquire, acquire_sync
from gymgate.stack.client.daemons import find_daemons
from support.hanging import Hanging
from support.json_output import read_output
from support.stacks import ROW, SIMPLE, all_gone, call_then_answer, pids_of, stack_config
from support.upstream import MODELS, Seen, Upstream, upstream

pytestmark = [pytest.mark.gym, pytest.mark.warm]

PAGE = Path(__file__).parents[2] / "docs/other-machines.md"
PIPE = asyncio.subprocess.PIPE


@pytest.fixture(scope="module")
def held() -> Iterator[SyncStack]:
    with acquire_sync(stack_config(share="machine")) as stack:
        yield stack


@pytest.fixture
def path(held: SyncStack) -> Path:
    """The held stack's socket."""
    return socket_of(held.call(held.stack.status())["pid"])


def socket_of(pid: int) -> Path:
    return find_daemons().choose(pid).command.socket_path


@pytest.fixture
async def policy() -> AsyncIterator[Upstream]:
    async def script(seen: Seen) -> web.Response:
        asked_for_models = seen.path.endswith("/models")
        return web.json_response(MODELS if asked_for_models else call_then_answer(seen.body))

    async with upstream(script) as serving:
        yield serving


def joining(path: Path, **fields: Any) -> StackConfig:
    return stack_config(server=str(path), **fields)


async def test_rollouts_run_on_a_joined_stack(held: SyncStack, path: Path, policy: Upstream) -> None:
    """With an endpoint and with a function, which is called in the process that joined."""
    async with acquire(joining(path)) as stack:
        function = stack.register("scripted", call_then_answer, dialect="responses")
        rollouts = await asyncio.gather(
            *(stack.run(ROW, policy=each) for each in (function, policy.endpoint(dialect="responses")) * 4)
        )
        status = await stack.status()
    assert [(rollout.error, rollout.reward) for rollout in rollouts] == [(None, 1.0)] * 8
    assert status["leases"] == 2
    assert pids_of(status) == pids_of(held.call(held.stack.status()))


async def test_a_stack_of_another_environment_or_other_settings_is_refused(
    held: SyncStack, path: Path
) -> None:
    """What the stack says of itself decides, and it goes on."""
    for config, named in {
        StackConfig(environments=("gpqa_diamond",), server=str(path)): "'gpqa_diamond'",
        joining(path, env_vars=("HOME",)): "env_vars",
        stack_config(version="0.6.0", server=str(path)): "0.6.0",
    }.items():
        with pytest.raises(ConfigError, match=named):
            async with acquire(config):
                pass
    assert (await asyncio.to_thread(held.call, held.stack.status()))["leases"] == 1


async def test_a_joined_stack_that_is_killed_is_lost(policy: Upstream) -> None:
    """The held one of this test, whose joined lease starts nothing in its place."""
    async with acquire(stack_config(share="machine", start_timeout_s=299)) as own:
        pids = pids_of(await own.status())
        path = socket_of(pids[0])
        async with acquire(joining(path)) as stack:
            hanging = Hanging()
            running = asyncio.create_task(stack.run(ROW, policy=lambda body: hanging({}, b"")))
            await hanging.begun.wait()
            os.kill(pids[0], signal.SIGKILL)
            with pytest.raises(StackLostError):
                await running
        with pytest.raises(StackLostError):
            async with acquire(joining(path)):
                pass
        assert path.is_socket()  # a killed daemon's, which the next one there replaces
    assert await all_gone(pids)


def programs() -> list[str]:
    """The Python programs of the page: the one that holds a stack and the one that joins it."""
    return [part.partition("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]


@asynccontextmanager
async def holder() -> AsyncIterator[asyncio.subprocess.Process]:
    """The documented program that holds a stack, which ends at the end of the block."""
    program = programs()[0].replace('"mcqa"', repr(SIMPLE))
    process = await asyncio.create_subprocess_exec(sys.executable, "-W", "error", "-c", program, stderr=PIPE)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        await process.communicate()


async def test_the_documented_programs_run(policy: Upstream, tmp_path: Path) -> None:
    """And a run whose spec has the path that `gymgate ps` prints."""
    async with holder() as process, asyncio.timeout(100):
        path = await listed(process.pid)
        program = programs()[1]
        for documented, here in {
            "/tmp/far.sock": path,
            'http://gpu:8000/v1"': f'{policy.url}", dialect="responses"',
            '"mcqa"': repr(SIMPLE),
        }.items():
            assert documented in program
            program = program.replace(documented, here)
        joined = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "error", "-c", program, stdout=PIPE
        )
        out, _ = await joined.communicate()
        assert (joined.returncode, out) == (0, b"completed 1.0\n")
        spec = tmp_path / "run.toml"
        spec.write_text(f'[stack]\nserver = "{path}"\n')
        words = ["run", SIMPLE, "--spec", str(spec), "-b", policy.url, "-m", "m", "--dialect", "responses"]
        out = await gymgate(*words, "-n", "2", "--json")
        assert json.loads(out)["finished"] == 2


async def gymgate(*words: str) -> bytes:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "gymgate", *words, stdout=PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out


async def listed(holder: int) -> str:
    """The path of the stack that a process holds, once that is up."""
    while True:
        stacks = read_output("ps", (await gymgate("ps", "--json")).decode())["stacks"]
        for stack in stacks:
            if stack["state"] == "ready" and holder in stack["processes"]:
                return str(stack["socket"])
