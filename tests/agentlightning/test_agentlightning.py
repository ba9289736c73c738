"""examples/agent_lightning with Agent Lightning's real server, local controller and collector of trained samples."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from agentlightning.schemas import RolloutState
from agentlightning.verl.agl_rollout_manager import AglRolloutManager, CompletedRollout
from aiohttp import web
from aiohttp.test_utils import unused_port

import gymgate
from support.scripted import ScriptedPolicy

pytestmark = [pytest.mark.gym, pytest.mark.timeout(240)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent_lightning"
TRAIN = runpy.run_path(str(EXAMPLE / "train.py"))
COUNTER = "example_session_state_mgmt"
KEY = "the-servers-key"


class TrainedPolicy(ScriptedPolicy):
    """Adds the token ids that Agent Lightning trains on, and fails the second call of rows that ask for it."""

    async def chat(self, body: dict[str, Any]) -> web.Response:
        assert body["return_token_ids"]
        answer = await super().chat(body)
        if "fail" in body["messages"][0]["content"] and body["messages"][-1]["role"] == "tool":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        assert isinstance(answer.body, bytes)
        value = orjson.loads(answer.body)
        value["prompt_token_ids"] = [*range(len(body["messages"]))]
        value["choices"][0]["token_ids"] = [7, 8]
        return web.json_response(value)


@pytest.fixture
async def policy() -> AsyncIterator[ScriptedPolicy]:
    async with TrainedPolicy().serving() as policy:
        yield policy


@contextmanager
def running(log: Path, *arguments: str) -> Iterator[None]:
    """A program of Agent Lightning's, which is interrupted at the end."""
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLE)}
    with log.open("wb") as output:
        command = [sys.executable, "-m", *arguments, f"hydra.run.dir={log.parent}"]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[str]:
    """Agent Lightning's server and its controller; the server's URL."""
    url = f"http://127.0.0.1:{(port := unused_port())}"
    serve = ("agentlightning.server", "host=127.0.0.1", f"port={port}", f"key={KEY}")
    control = (
        "agentlightning.controller",
        "runner_type=local",
        f"agl_server.url={url}",
        f"agl_server.key={KEY}",
    )
    with (
        running(tmp_path / "server.log", *serve, "default_proxy.model_name=m"),
        running(tmp_path / "controller.log", *control, "local_runner.poll_interval=0.2"),
    ):
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.get(f"{url}/healthz") as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    await asyncio.sleep(0.1)
        yield url
        print((tmp_path / "controller.log").read_text())


def row(**changes: Any) -> dict[str, Any]:
    return {**orjson.loads(TRAIN["read_rows"](COUNTER)[0]["nemo_gym_row"]), **changes}


async def collected(url: str, policy: ScriptedPolicy, *rows: dict[str, Any]) -> list[CompletedRollout]:
    """What Agent Lightning's trainer collects for these rows, in their order."""
    variables = {**TRAIN["env_map"](COUNTER), "NEMO_GYM_LINGER_S": "0"}
    manager = AglRolloutManager(
        agl_base_url=url,
        agl_key=KEY,
        model="m",
        step=1,
        rollout_timeout_seconds=150,
        poll_interval_seconds=0.2,
        local_agent_class="agent:NeMoGymAgent",
        local_env_map=variables,
    )
    config = gymgate.StackConfig(environments=(COUNTER,), share="machine")
    async with gymgate.acquire(config):  # the agents' processes use this stack, so it ends with the test
        texts = [orjson.dumps(row).decode() for row in rows]
        with manager.client:
            manager.register_model([policy.base_url])
            done = await asyncio.to_thread(
                manager.enqueue_and_wait_until_completed, {"nemo_gym_row": texts}, is_train=True
            )
    return sorted(done, key=lambda rollout: rollout.sample_idx_in_step)


async def test_rows_are_trained_on_with_their_rewards_and_failures_are_not(
    server: str, policy: ScriptedPolicy
) -> None:
    """Two rows that are scored, one whose model calls fail half way, and one that cannot be scored."""
    wrong = row(expected_count=7)
    prompt = {
        "input": [{"role": "user", "content": "fail"}],
        "tools": row()["responses_create_params"]["tools"],
    }
    failing = row(responses_create_params=prompt)
    unscorable = {name: value for name, value in row().items() if name != "expected_count"}
    done = await collected(server, policy, row(), wrong, failing, unscorable)
    states = [rollout.rollout_state for rollout in done]
    assert states == [RolloutState.SUCCEEDED] * 2 + [RolloutState.FAILED] * 2
    assert [rollout.final_reward for rollout in done] == [1.0, 0.0, None, None]
    # Agent Lightning would train on the failed ones' calls with a reward of 0.0; it skips a rollout without any.
    assert [len(rollout.triplets or []) for rollout in done] == [4, 4, 0, 0]
    assert policy.calls["chat"] == 4 + 4 + 2 + 4
