"""What prime-rl 0.8 does with an environment, by the same calls of verifiers; prime-rl itself needs GPUs.

Its launcher starts an env server for each source (`prime_rl/entrypoints/env_server.py`). Its orchestrator loads the tasks and
sends each to that server (`prime_rl/orchestrator/envs.py`), and makes training samples of the branches (`.../trajectories.py`).
"""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: run ./dev engine")

import verifiers.v1 as vf
from benchmarks.engine.server import MODEL
from pydantic import SerializeAsAny, model_validator
from pydantic_config import BaseConfig
from renderers.configs import DefaultRendererConfig
from verifiers.v1.serve import EnvClient, env_config_data, serve_env

pytestmark = [pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(900)]

LETTERS = Path(__file__).parents[2] / "examples/own_environment/resources_servers/letter_share"
GROUP = 4


class Source(BaseConfig):
    """The part of prime-rl's `TrainSourceConfig` that verifiers knows."""

    env: SerializeAsAny[vf.EnvConfig] = vf.SingleAgentEnvConfig()
    serve: vf.ServeConfig = vf.ServeConfig()

    @model_validator(mode="before")
    @classmethod
    def _resolve_env(cls, data: dict[str, object]) -> dict[str, object]:
        return vf.resolve_env_field(data, vf.narrowed_env_annotation(cls))


async def test_a_source_trains_on_what_its_env_server_sampled(
    tmp_path: Path, vllm_url: str, model_directory: Path
) -> None:
    taskset = {
        "id": "nemo-gym-env",
        "env": str(LETTERS / "configs/letter_share.yaml"),
        "data": str(LETTERS / "data/one_letter.jsonl"),
        "share": "machine",
    }
    source = Source.model_validate({"env": {"taskset": taskset}})
    address = f"ipc://{tmp_path}/env"
    arguments = {
        **vf.pool_serve_kwargs(source.serve.pool),  # elastic, prime-rl's default
        "address": address,
        "config_data": env_config_data(source.env),
        "max_concurrent": source.serve.max_concurrent,
    }
    server = multiprocessing.get_context("spawn").Process(target=serve_env, kwargs=arguments)
    server.start()
    client = EnvClient(address=address)
    try:
        await client.wait_for_server_startup(timeout=300)
        tasks = await asyncio.to_thread(lambda: list(vf.load_taskset(source.env.taskset)))
        policy = vf.TrainClientConfig(
            base_url=f"{vllm_url}/v1",
            api_key_var="GYMGATE_TEST_NO_KEY",
            renderer=DefaultRendererConfig(),
            renderer_model_name=str(model_directory),
        )
        sampling = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "max_completion_tokens": 8}
        episodes = await asyncio.gather(
            *(
                client.run(
                    task_data=tasks[0].data.model_dump(mode="json"),
                    client=policy,
                    model=MODEL,
                    sampling=vf.SamplingConfig(**sampling, extra_body={"cache_salt": "0"}),
                )
                for _ in range(GROUP)
            )
        )
    finally:
        await client.close()
        server.terminate()
        await asyncio.to_thread(server.join, 30)
        server.kill()
    for episode in episodes:
        (trace,) = episode.traces
        assert episode.ok, trace.errors
        assert trace.agent.trainable
        assert 0 <= trace.reward <= 1
        (branch,) = trace.branches
        sampled = sum(branch.sampled_mask)
        assert 0 < sampled <= 8
        assert len(branch.token_ids) == len(branch.sampled_mask) == len(branch.logprobs)
