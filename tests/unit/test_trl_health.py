"""How the trainer's side sees that the rollouts' process lives: by a clock of the machine that nobody sets."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from gymgate.core.errors import StackLostError
from gymgate.integrations.trl.async_worker import START_TIMEOUT_S, RolloutWorker

ARGS = SimpleNamespace(vllm_server_base_url="http://127.0.0.1:9", queue_maxsize=4)


@pytest.fixture
def worker() -> RolloutWorker:
    """One whose process runs, as far as the operating system says."""
    made = RolloutWorker(SimpleNamespace(), ARGS, None)  # type: ignore[arg-type]
    made._process = SimpleNamespace(exitcode=None)  # type: ignore[assignment]
    made._started = time.monotonic()
    return made


def test_another_process_reads_the_same_clock() -> None:
    code = "import time; print(time.monotonic())"
    before = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert before < float(done.stdout) < time.monotonic()


@pytest.mark.parametrize("moved_s", [-1e6, 1e6])
def test_a_clock_that_is_set_is_no_death(
    worker: RolloutWorker, moved_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker._channels.heartbeat.value = time.monotonic()
    read = time.time

    def moved() -> float:
        return read() + moved_s

    monkeypatch.setattr(time, "time", moved)
    worker.check_health(60)


def test_no_life_is_told_however_the_clock_is_set(
    worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def back() -> float:
        return 0.0

    monkeypatch.setattr(time, "time", back)
    worker._channels.heartbeat.value = time.monotonic() - 61
    with pytest.raises(StackLostError, match=r"\b61 s"):
        worker.check_health(60)


def test_a_start_has_longer(worker: RolloutWorker) -> None:
    worker._started = time.monotonic() - 61
    worker.check_health(60)
    worker._started = time.monotonic() - START_TIMEOUT_S - 1
    with pytest.raises(StackLostError, match=r"\b301 s"):
        worker.check_health(60)


def test_what_failed_comes_first(worker: RolloutWorker) -> None:
    told: dict[str, Any] = {"error": "StackLostError", "message": "the stack did not start"}
    worker._channels.failure.put(told)
    worker._channels.failed.set()
    with pytest.raises(StackLostError, match="the stack did not start"):
        worker.check_health(60)
