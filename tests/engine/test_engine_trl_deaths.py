"""kill -9 of a trainer while the process that samples on vLLM for it waits for room in its queue."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs trl: run ./dev engine")

from test_trl_deaths import killed, runtime_directory  # noqa: F401

pytestmark = [
    *(pytest.mark.gym, pytest.mark.heavy, pytest.mark.timeout(1200)),
    pytest.mark.filterwarnings("default"),
]

FULL = """
from trl.experimental.async_grpo import AsyncGRPOConfig
from transformers import AutoTokenizer
from support.trl_rows import arguments
from gymgate.trl import NeMoGymSpec

environment, data, folder, url, model = sys.argv[1:]
limits = {"max_completion_length": 8, "queue_maxsize": 4, "max_inflight_tasks": 8, "num_generations": 4}
args = AsyncGRPOConfig(**arguments(folder, vllm_server_base_url=url, per_device_train_batch_size=4, **limits))
spec = NeMoGymSpec(environment, data=data, score_truncated=True)
worker = spec.rollout_worker(args, AutoTokenizer.from_pretrained(model))
worker.start()
while worker.rollout_buffer.qsize() < 4:
    worker.check_health(600)
    time.sleep(0.02)
say("full")
time.sleep(600)
"""


async def test_rollouts_that_wait_for_room_end_with_their_trainer(
    tmp_path: Path,
    runtime_directory: Path,  # noqa: F811
    vllm_url: str,
    model_directory: Path,
) -> None:
    await killed(runtime_directory, "full", FULL, tmp_path, vllm_url, model_directory, within_s=900)
