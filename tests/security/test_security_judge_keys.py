"""Two processes with keys of their own, one config, one machine: each judge call carries the key of whose rollout it is."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from support.faulty import CONFIG
from support.stacks import answer
from support.upstream import Seen, upstream

pytestmark = [pytest.mark.gym, pytest.mark.warm]

SERVER = """
from typing import ClassVar
import aiohttp
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig, BaseVerifyRequest, BaseVerifyResponse, SimpleResourcesServer)

class Config(BaseResourcesServerConfig):
    fault: str = "none"
    tool: str = "none"

class Judged(SimpleResourcesServer):
    ray_enabled: ClassVar[bool] = False
    config: Config

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        name = body.responses_create_params.input[0].content
        keyed = await self.server_client.post(
            server_name="judge_model", url_path="/v1/responses", json={"input": f"{name} keyed"})
        judge = self.server_client.global_config_dict["judge_model"]["responses_api_models"]["openai_model"]
        url = f"http://{judge['host']}:{judge['port']}/v1/responses"
        async with aiohttp.ClientSession() as http, http.post(url, json={"input": f"{name} keyless"}) as keyless:
            served = [keyed.status, keyless.status] == [200, 200]
        return BaseVerifyResponse(**body.model_dump(), reward=1.0 if served else 0.0)

if __name__ == "__main__":
    Judged.run_webserver()
"""
PROCESS = """
import asyncio, sys
from support.stacks import *
from gymgate.core.config import HTTPEndpoint
from gymgate.stack import acquire

name, environment, url, version = sys.argv[1:]

async def main():
    judge = HTTPEndpoint(base_url=url, dialect="responses", api_key_env="THE_JUDGE_KEY")
    config = stack_config(environment, version=version, models={"judge_model": judge}, share="machine")
    row = {"responses_create_params": {"input": [{"role": "user", "content": name}]}}
    async with acquire(config) as stack:
        policy = stack.register("scripted", call_then_answer, dialect="responses")
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        rollouts = await asyncio.gather(*(stack.run(row, policy=policy) for _ in range(4)))
        print(*(rollout.reward for rollout in rollouts), [r.error for r in rollouts if r.error], flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@pytest.fixture
async def judge() -> AsyncIterator[tuple[set[tuple[str, str]], str]]:
    """What was asked with which key, and where."""
    seen: set[tuple[str, str]] = set()

    async def judged(asked: Seen) -> web.Response:
        seen.add((asked.body["input"], asked.headers.get("Authorization", "")))
        return web.json_response(answer())

    async with upstream(judged) as serving:
        yield seen, serving.url


def environment_in(directory: Path) -> str:
    """A resources server that asks its judge twice: with the rollout's key, and without one."""
    home = directory / "resources_servers" / "faulty"
    (home / "configs").mkdir(parents=True)
    (home / "app.py").write_text(SERVER)
    (home / "configs" / "faulty.yaml").write_text(CONFIG)
    return str(home / "configs" / "faulty.yaml")


async def start(name: str, *arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    support = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": support, "THE_JUDGE_KEY": f"key-of-{name}"}
    command = [sys.executable, "-c", PROCESS, name, *arguments]
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("version", ["0.7.0", "0.6.0"])
async def test_a_judges_key_serves_its_own_process_only(
    version: str, judge: tuple[set[tuple[str, str]], str], tmp_path: Path
) -> None:
    """At the same time, with a rollout's key in the call and without."""
    seen, url = judge
    environment = environment_in(tmp_path)
    processes = [await start(name, environment, url, version) for name in ("ann", "bob")]
    try:
        assert [await line(process) for process in processes] == ["up", "up"]
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"run\n")
        assert [await line(process) for process in processes] == ["1.0 1.0 1.0 1.0 []"] * 2
    finally:
        await asyncio.gather(*(process.communicate(b"end\n") for process in processes))
    assert seen == {
        (f"{name} {how}", f"Bearer key-of-{name}") for name in ("ann", "bob") for how in ("keyed", "keyless")
    }
