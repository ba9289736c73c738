"""The plugin under what prime-rl trains with: verifiers' training client, an env server's workers, vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

pytest.importorskip("torch", reason="needs torch: run ./dev engine")

import torch
import verifiers.v1 as vf
from benchmarks.engine.server import MODEL
from renderers.configs import DefaultRendererConfig
from verifiers.v1.serve import EnvClient, env_config_data, serve_env

from gymgate.stack import Stack, acquire
from nemo_gym_env import load_environment

pytestmark = [
    pytest.mark.gym,
    pytest.mark.heavy,
    pytest.mark.timeout(500),
]  # the first test waits for the server

LETTERS = str(
    Path(__file__).parents[2]
    / "examples/own_environment/resources_servers/letter_share/configs/letter_share.yaml"
)
TURNS = "example_multi_turn_gymnasium"
WORKERS, ROLLOUTS = 3, 12
SAMPLING = vf.SamplingConfig(temperature=1.0, max_tokens=12)


@pytest.fixture
def client(vllm_url: str, model_directory: Path) -> vf.TrainClientConfig:
    return vf.TrainClientConfig(
        base_url=f"{vllm_url}/v1",
        api_key_var="GYMGATE_TEST_NO_KEY",
        renderer=DefaultRendererConfig(),
        renderer_model_name=str(model_directory),
    )


async def group(env: vf.Env[Any], client: vf.ClientConfig, n: int) -> list[vf.Trace[Any]]:
    task = next(iter(env.taskset))
    context = vf.ModelContext(client=client, model=MODEL, sampling=SAMPLING)
    episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in env.slots(task, n)))
    return [trace for episode in episodes for trace in episode.traces]


@pytest.mark.parametrize("name", [LETTERS, TURNS], ids=["one turn", "several turns"])
async def test_branches_are_samples_of_the_models_own_tokens(
    name: str, client: vf.TrainClientConfig, model: Any
) -> None:
    """Each branch's logprobs are those that the model gives the same ids afterwards; rewards stand on the trace."""
    env = load_environment(env=name)
    async with env.serving():
        traces = await group(env, client, 4)
    assert [trace.ok for trace in traces] == [True] * 4, [trace.errors for trace in traces]
    for trace in traces:
        assert trace.rewards
        for branch in trace.branches:
            assert any(branch.sampled_mask)
            assert len(branch.token_ids) == len(branch.sampled_mask)
            assert len(branch.logprobs) == len(branch.token_ids)
            check_logprobs(model, branch)
    sampled = sum(any(branch.sampled_mask) for trace in traces for branch in trace.branches)
    assert sampled >= len(traces)


def check_logprobs(model: Any, branch: Any) -> None:
    """Score the whole branch with the same weights."""
    ids = torch.tensor([branch.token_ids])
    with torch.no_grad():
        scored = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
    for place, (token, sampled) in enumerate(zip(branch.token_ids, branch.sampled_mask, strict=True)):
        if sampled:
            assert branch.logprobs[place] == pytest.approx(float(scored[place - 1, token]), abs=1e-3)


@contextlib.contextmanager
def env_server(data: dict[str, Any]) -> Iterator[tuple[str, BaseProcess]]:
    """verifiers' own, a broker with its workers in processes of their own."""
    context = multiprocessing.get_context("spawn")
    addresses = context.Queue()
    arguments = {
        "max_workers": WORKERS,
        "elastic": False,
        "address": "tcp://127.0.0.1:*",
        "address_queue": addresses,
        "config_data": data,
    }
    process = context.Process(target=serve_env, kwargs=arguments)
    process.start()
    try:
        yield addresses.get(timeout=60), process
    finally:
        process.terminate()
        process.join(20)
        process.kill()


async def until(stack: Stack, **expected: int) -> None:
    """Wait until the stack's status has these values."""
    async with asyncio.timeout(100):
        while True:
            status = await stack.status()
            if all(status[name] == value for name, value in expected.items()):
                return
            await asyncio.sleep(0.05)  # another process's state: there is no event to wait for


async def pause(url: str, what: str) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"{url}/{what}") as response:
        assert response.status == 200


@pytest.mark.heavy
async def test_workers_share_a_stack_and_one_that_dies_takes_only_its_own_rollouts(
    client: vf.TrainClientConfig, vllm_url: str
) -> None:
    """verifiers' broker never answers for a worker that is gone: its caller's deadline is what fails those rollouts."""
    env = load_environment(env=LETTERS, share="machine")
    tasks = [task.data for task in env.taskset][:1] * ROLLOUTS
    with env_server(env_config_data(env.config)) as (address, broker):
        async with acquire(env.config.taskset.run_spec().stack) as stack:
            await until(stack, leases=1 + WORKERS)
            assert len((await stack.status())["fork_servers"]) == 1
            caller = EnvClient(address)
            await pause(vllm_url, "pause?mode=keep")
            runs = [
                asyncio.ensure_future(caller.run(client, MODEL, SAMPLING, data.model_dump(mode="json")))
                for data in tasks
            ]
            await until(stack, rollouts=ROLLOUTS)
            os.kill(workers(broker)[0], signal.SIGKILL)
            await until(stack, rollouts=ROLLOUTS - ROLLOUTS // WORKERS, leases=WORKERS)
            await pause(vllm_url, "resume")
            done: set[asyncio.Future[Any]] = set()
            pending = set(runs)
            async with asyncio.timeout(100):
                while len(done) < ROLLOUTS - ROLLOUTS // WORKERS:
                    finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    done |= finished
            for run in done:
                (trace,) = run.result().traces
                assert trace.errors == []
                assert trace.rewards
            assert len(pending) == ROLLOUTS // WORKERS
            for run in pending:
                run.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await until(stack, rollouts=0)
            await caller.close()


def workers(broker: BaseProcess) -> list[int]:
    """The broker's workers: its children but multiprocessing's resource tracker."""
    text = Path(f"/proc/{broker.pid}/task/{broker.pid}/children").read_text()
    found = [int(pid) for pid in text.split()]
    return [pid for pid in found if "resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_text()]
