"""kill -9 of a trainer: the process that rolls out for it ends, and the stack with it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

from support.ledger import Ledger, adopt_orphans, children, program

pytestmark = [pytest.mark.gym, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

HERE = Path(__file__).parent
STUCK = """
from types import SimpleNamespace
from gymgate.trl import NeMoGymSpec

class Stuck:
    def __reduce__(self):
        return time.sleep, (600,)

args = SimpleNamespace(
    vllm_server_base_url="http://127.0.0.1:9", max_inflight_tasks=1, num_generations=1, queue_maxsize=1,
    max_completion_length=8, chat_template_kwargs=None,
)
environment, data = sys.argv[1:]
worker = NeMoGymSpec(environment, data=data, renderer=Stuck()).rollout_worker(args, None)
worker.start()
say("started")
time.sleep(600)
"""
LETTERS = HERE.parents[1] / "examples/own_environment/resources_servers/letter_share"
ROWS = (LETTERS / "configs/letter_share.yaml", LETTERS / "data/one_letter.jsonl")
GONE_S = 30.0
"""In which everything has to be gone: the five seconds for an orderly end, and what a busy machine adds."""


@pytest.fixture
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


async def killed(
    runtime_directory: Path, line: str, code: str, *arguments: object, within_s: float = 300
) -> None:
    """Kill a trainer that has said so; nothing of it stays."""
    adopt_orphans()
    ledger = Ledger(runtime_directory)
    async with program(code, *ROWS, *arguments, PYTHONPATH_FIRST=str(HERE.parents[1])) as trainer:
        await trainer.until_line(line, within_s)
        assert children(trainer.pid)
        trainer.signal(9)
        # Its end is not waited for: asyncio does so until its output ends, which the rollouts' process has too.
        assert not (left := await asyncio.to_thread(ledger.settle, GONE_S, ("processes", "traces"))), left


async def test_rollouts_that_are_stuck_at_their_start_end_with_their_trainer(runtime_directory: Path) -> None:
    """Nothing that imports or unpickles there looks whether the trainer lives."""
    await killed(runtime_directory, "started", STUCK)
