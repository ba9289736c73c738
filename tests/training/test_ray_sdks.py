"""TRL, verl and verifiers with their stacks on the nodes of a real Ray cluster on this machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need TRL: see docs/training.md")
pytest.importorskip("verl", reason="training tests need verl: see docs/training.md")
pytest.importorskip("support.verl_quiet")

from benchmarks.ray_nodes import ray_cluster
from trl import GRPOConfig, GRPOTrainer
from verl.experimental.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.dataset.rl_dataset import collate_fn

from gymgate.core.config import RuntimeConfig
from gymgate.gym.runtime import ensure_runtime
from gymgate.integrations.verl.worker import _workers
from gymgate.tokens.engines import CallableEngine, Sample
from gymgate.trl import NeMoGymSpec
from support.trl_rows import ENVIRONMENT, ONE_LETTER, arguments, tiny
from support.verl_parts import Scripted, example_rows, make_config

pytestmark = [
    pytest.mark.gym,
    pytest.mark.heavy,
    pytest.mark.timeout(500),
    pytest.mark.filterwarnings("default"),  # Ray's own
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_cluster(1, 1) as cluster:
        yield cluster.address


def test_trl_trains_over_the_nodes(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model, tokenizer, renderer = tiny()
    good = [*tokenizer.encode("aaaa", add_special_tokens=False), tokenizer.eos_token_id]
    engine = CallableEngine(lambda prompt, sampling: Sample(good, [-1.0] * len(good), "stop"))
    with NeMoGymSpec(
        ENVIRONMENT, data=ONE_LETTER, ray=address, engine=engine, renderer=renderer, limits={"timeout_s": 60}
    ) as spec:
        trainer = GRPOTrainer(
            model=model,
            args=GRPOConfig(
                **arguments(
                    tmp_path,
                    per_device_train_batch_size=8,
                    num_generations=4,
                    max_completion_length=8,
                    max_steps=2,
                )
            ),
            processing_class=tokenizer,
            train_dataset=spec.train_dataset,
            rollout_func=spec.rollout_func,
            reward_funcs=spec.reward_funcs,
        )
        trainer.train()
        assert spec._loop is not None
        stack = spec._loop.call(spec._runner.start())
        assert len(spec._loop.call(stack.status())["nodes"]) == 2
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["reward"] for entry in logged] == [1.0, 1.0]
    assert {entry["nemo_gym/failed"] for entry in logged} == {0.0}


async def test_verls_worker_runs_over_the_nodes(address: str, tmp_path: Path) -> None:
    name = "workplace_assistant"
    config = make_config(tmp_path, (name,), ray={"address": address, "rollouts_per_stack": 2})
    rows = example_rows((await asyncio.to_thread(ensure_runtime, RuntimeConfig())).site, name)
    dataset = create_rl_dataset(config.data.train_files, config.data, None, None)
    items = [dataset[number] for number in range(len(dataset))]
    batch = DataProto.from_single_dict(collate_fn(items), meta_info={"global_steps": 1})
    try:
        made = await AgentLoopWorker(config, Scripted(rows), None, None).generate_sequences(batch)
        assert made.batch["rm_scores"].sum(1).tolist() == [1.0] * len(rows)
        [worker] = _workers[asyncio.get_running_loop()].values()
        status = await (await worker.runner.start()).status()
        assert len(status["nodes"]) == 2
    finally:
        workers = _workers.get(asyncio.get_running_loop(), {}).values()
        await asyncio.gather(*(worker.runner.close() for worker in workers))


def test_verifiers_eval_runs_over_the_nodes(address: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gymgate", "eval", "run", "nemo-gym-env", "-r", "6", "-c", "3"]
    done = subprocess.run(
        [*command, "--env.taskset.ray", address],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("example_session_state_mgmt ")]
    assert line.split()[1:3] == ["6", "1.000"], "a column for failed rollouts would stand between them"
    [log] = tmp_path.glob("outputs/*/logs/latest/eval.log")
    assert " 2 nodes" in log.read_text()
