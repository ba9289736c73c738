"""Parts of a reward in verl's v1 trainer, over real NeMo Gym environments, on a CPU."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("verl", reason="training tests need verl: see docs/training.md")
pytest.importorskip("support.verl_quiet")

from verl.experimental.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.utils import create_rl_dataset
from verl.utils.dataset.rl_dataset import collate_fn

from gymgate.core.config import RuntimeConfig
from gymgate.gym.runtime import ensure_runtime
from gymgate.integrations.verl.worker import _workers
from support.verl_parts import Scripted, example_rows, make_config
from support.verl_trainer import QUEUE, CPUTrainer, manager_of, running_queue

pytestmark = [pytest.mark.gym, pytest.mark.timeout(500), pytest.mark.filterwarnings("default")]

PARTS = "example_tool_call_multireward"
"""Its parts are correctness, schema_valid and format; its reward is their sum."""
BLEND = (PARTS, "mcqa")
PLAN = ("right", "wrong", "broken", "right")
"""Of each prompt: three sessions of a step, one of a validation."""
ROWS = 10


def test_weights_make_the_reward_and_a_missing_part_stays_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group has a session that is right, one that is wrong and one that fails. mcqa's rewards have no parts."""
    config = make_config(
        tmp_path,
        BLEND,
        "actor_rollout_ref.rollout.n=3",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS}",
        f"data.train_batch_size={ROWS}",
        *QUEUE,
        "trainer.total_training_steps=1",
        reward_parts={"correctness": 4.0, "format": 0.0, "style": 7.0},
    )
    log = tmp_path / "log.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    with running_queue(config):
        trainer = CPUTrainer(config)
        trainer.init()
        trainer.fit(manager_of(config, BLEND, PLAN))

    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    (trained,) = trainer.weights.trained
    columns = (trained[name] for name in ("key", "tag", "response_mask", "advantages", "rm_scores"))
    for key, tag, mask, advantages, scores in zip(*columns, strict=True):
        if not tag.get("is_padding"):
            (advantage,) = {value for value, on in zip(advantages, mask, strict=True) if on}
            groups[key.split("_")[0]].append((sum(scores), advantage))
    # a right call is worth 1 for correctness and 1 for schema_valid, and no more: the agent says a word after it
    assert sorted(sorted(reward for reward, _ in group) for group in groups.values()) == [
        *[[0.0, 1.0]] * 5,
        *[[0.0, 2.0 + 4.0]] * 5,
    ]
    for group in groups.values():
        rewards = [reward for reward, _ in group]
        for reward, advantage in group:
            assert advantage == pytest.approx((reward - mean(rewards)) / stdev(rewards), abs=1e-3)

    logged = json.loads(log.read_text().splitlines()[-1])["data"]
    assert logged[f"nemo_gym/{PARTS}/reward"] == 1.0  # the environment's own, of the two that count
    assert logged[f"nemo_gym/{PARTS}/reward/correctness"] == logged["nemo_gym/reward/correctness"] == 0.5
    assert logged[f"nemo_gym/{PARTS}/failed"] == pytest.approx(1 / 3)
    assert logged[f"val-core/{PARTS}/reward/mean@1"] == 6.0
    assert logged[f"val-aux/{PARTS}/correctness/mean@1"] == 1.0
    assert logged[f"val-aux/{PARTS}/format/mean@1"] == 0.0
    missing = ("mcqa/correctness", "mcqa/format", "mcqa/reward/", "/style")
    assert not [name for name in logged if any(part in name for part in missing) and "core" not in name]


async def test_every_rollout_of_verls_v0_batch_has_the_names_and_a_missing_part_is_none(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path, BLEND, reward_parts={"correctness": 1.0})
    dataset = create_rl_dataset(config.data.train_files, config.data, None, None)
    batch = DataProto.from_single_dict(
        collate_fn([dataset[number] for number in range(len(dataset))]), meta_info={"global_steps": 1}
    )
    site = ensure_runtime(RuntimeConfig()).site
    server = Scripted([row for name in BLEND for row in example_rows(site, name)])
    try:
        made = await AgentLoopWorker(config, server, None, None).generate_sequences(batch)
    finally:
        workers = _workers.get(asyncio.get_running_loop(), {}).values()
        await asyncio.gather(*(worker.runner.close() for worker in workers))
    parts = made.non_tensor_batch["correctness"].tolist()
    assert parts == [1.0] * 5 + [None] * 5
    assert made.batch["rm_scores"].sum(1).tolist() == [3.0] * 5 + [1.0] * 5
    sources = made.non_tensor_batch["data_source"].tolist()
    means = process_validation_metrics(sources, [str(number) for number in range(10)], {"correctness": parts})
    assert means[PARTS]["correctness"]["mean@1"] == 1.0
    assert "correctness" not in means.get("mcqa", {})
