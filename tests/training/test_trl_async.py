"""The process that rolls out for AsyncGRPOTrainer: how it fails. tests/engine trains with it."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # its import warns

from trl.experimental.async_grpo import AsyncGRPOConfig

from gymgate.core.errors import ConfigError, GymgateError, PolicyError
from gymgate.trl import NeMoGymSpec
from support.trl_rows import ENVIRONMENT, ONE_LETTER, arguments, tiny

pytestmark = [pytest.mark.gym, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]


def spec_of(**more: Any) -> NeMoGymSpec:
    wanted = {"data": ONE_LETTER, "renderer": "qwen3", **more}
    return NeMoGymSpec(ENVIRONMENT, limits={"timeout_s": 60}, **wanted)


def config(folder: Path, url: str) -> AsyncGRPOConfig:
    return AsyncGRPOConfig(
        **arguments(folder, vllm_server_base_url=url, num_generations=8, per_device_train_batch_size=16)
    )


def until(worker: Any, ready: Callable[[], bool]) -> None:
    """Wait for what the process does; the test's timeout bounds it."""
    while not ready():
        worker.check_health(60)
        time.sleep(0.02)


def test_what_ends_the_process_reaches_the_trainer(tmp_path: Path) -> None:
    """No server: a clear error instead of a trainer that waits."""
    worker = spec_of().rollout_worker(config(tmp_path, "http://127.0.0.1:9"), tiny()[1])
    worker.start()
    try:
        with pytest.raises(PolicyError, match=r"http://127\.0\.0\.1:9/v1/models"):
            until(worker, lambda: False)
    finally:
        worker.stop()


def test_what_cannot_be_pickled_is_refused_with_advice(tmp_path: Path) -> None:
    worker = spec_of(renderer=lambda tokenizer: None).rollout_worker(
        config(tmp_path, "http://127.0.0.1:9"), tiny()[1]
    )
    with pytest.raises(ConfigError, match="lambda"):
        worker.start()
    with pytest.raises(queue.Empty):
        worker.rollout_buffer.get_nowait()
    assert issubclass(ConfigError, GymgateError)
