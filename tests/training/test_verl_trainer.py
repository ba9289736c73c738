"""verl's v1 trainer, its Ray workers, TransferQueue and replay buffer over real NeMo Gym environments, on a CPU."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from statistics import mean, stdev

import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("verl", reason="training tests need verl: see docs/training.md")
pytest.importorskip("support.verl_quiet")

import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf

from gymgate.core.errors import PolicyError
from gymgate.integrations.verl.dataset import plain
from gymgate.integrations.verl.reports import PARTITION
from gymgate.integrations.verl.worker import LoopConfig
from gymgate.stack import acquire
from gymgate.verl import NeMoGymReplayBufferAsync
from support.verl_parts import VERSION, make_config
from support.verl_trainer import QUEUE, CPUTrainer, manager_of, running_queue

pytestmark = [pytest.mark.gym, pytest.mark.timeout(500), pytest.mark.filterwarnings("default")]

BLEND = ("workplace_assistant", "mcqa", "example_session_state_mgmt")
"""Environments that score in no time: what math_with_judge cannot check within its own few seconds scores 0."""
N = 5
PLAN = ("right", "wrong", "cut", "broken", "right", "right", *(("broken",) * N))
"""What the sessions of a prompt do, in the order they come: a step, a validation, a step of failures."""
ROWS = 15


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    return make_config(
        tmp_path_factory.mktemp("verl"),
        BLEND,
        f"actor_rollout_ref.rollout.n={N}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={ROWS}",
        f"data.train_batch_size={ROWS}",
        *QUEUE,
        "trainer.total_training_steps=2",
    )


@pytest.fixture(scope="module")
def queue(config: DictConfig) -> Iterator[None]:
    with running_queue(config):
        yield


async def leases_of(config: DictConfig) -> int:
    entry = plain(OmegaConf.load(config.actor_rollout_ref.rollout.agent.agent_loop_config_path))[0]
    ours = {name: value for name, value in entry.items() if name in LoopConfig.names()}
    async with acquire(LoopConfig.model_validate(ours).stack) as stack:
        return int((await stack.status())["leases"])


def test_a_step_of_the_trainer_and_one_of_failures(
    config: DictConfig, queue: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """75 sessions of 15 groups, of each five: two right, one wrong, one cut short, one failed.

    Three of each are trained on, with advantages among those three; the others are nowhere, and verl fills the batch with its
    own padding. Two Ray workers share one stack. verl's own log has the figures of all 75. Then all fail, of which verl alone
    says only that there is nothing to train on.
    """
    log = tmp_path / "log.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    trainer = CPUTrainer(config)
    trainer.init()
    told = r"75 of the 75 rollouts .* nothing to train on .*: policy: .*out of memory"
    with pytest.raises(PolicyError, match=told):
        trainer.fit(manager_of(config, BLEND, PLAN))
    assert asyncio.run(leases_of(config)) == 3  # two workers, and this one

    (trained,) = trainer.weights.trained
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for key, tag, mask, advantages, scores in zip(*(trained[name] for name in COLUMNS), strict=True):
        if tag.get("is_padding"):
            assert not any(mask)
            continue
        assert (tag["min_global_steps"], tag["max_global_steps"]) == (VERSION, VERSION)
        assert any(mask)
        (advantage,) = {value for value, on in zip(advantages, mask, strict=True) if on}
        groups[key.split("_")[0]].append((sum(scores), advantage))
    assert len(groups) == ROWS
    for group in groups.values():
        rewards = [reward for reward, _ in group]
        assert sorted(rewards) == [0.0, 1.0, 1.0]
        for reward, advantage in group:
            assert advantage == pytest.approx((reward - mean(rewards)) / stdev(rewards), abs=1e-3)

    statuses = Counter(tag["status"] for tag in tq.kv_list(partition_id="train")["train"].values())
    assert statuses == {"failure": ROWS}

    (line,) = log.read_text().splitlines()
    logged = json.loads(line)["data"]
    for prefix in ("nemo_gym", *(f"nemo_gym/{name}" for name in BLEND)):
        assert logged[f"{prefix}/failed"] == logged[f"{prefix}/failed_policy"] == pytest.approx(1 / N)
        assert logged[f"{prefix}/truncated"] == pytest.approx(1 / N)
        assert logged[f"{prefix}/prefix_misses"] == 0
        assert logged[f"{prefix}/latency_s"] > 0
    assert logged["nemo_gym/workplace_assistant/turns"] > logged["nemo_gym/mcqa/turns"]
    assert logged["critic/rewards/mean"] == pytest.approx(2 / 3)
    assert logged["training/rollout_probs_diff_max"] == pytest.approx(0)
    for name in BLEND:
        assert logged[f"val-core/{name}/reward/mean@1"] == 1.0
        assert f"val-aux/{name}/turns/mean@1" in logged


COLUMNS = ("key", "tag", "response_mask", "advantages", "rm_scores")


def test_an_endless_refill_ends_with_the_reason(queue: None) -> None:
    """verl's asynchronous modes draw another prompt for each group that failed, for ever."""
    numbers = count()

    def refill(wanted: int) -> None:
        for uid in (f"u{next(numbers)}" for _ in range(wanted)):
            failed = {"is_prompt": True, "status": "failure", "global_steps": 1}
            tq.kv_put(key=uid, partition_id="train", tag=failed)
            untrained = {"error": "PolicyError", "message": "policy: no server"}
            tag = {"environment": "mcqa", "metrics": {}, "untrained": untrained}
            tq.kv_put(key=f"{uid}_0", partition_id=PARTITION, tag=tag)

    buffer = NeMoGymReplayBufferAsync(
        trainer_mode="colocate_async",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        poll_interval=0.01,
        refill_fn=refill,
    )
    known = tq.kv_list(partition_id="train") or {}
    if left := [*known.get("train", {})]:
        tq.kv_clear(keys=left, partition_id="train")
    refill(2)
    with pytest.raises(PolicyError, match=r"8 of the 8 rollouts .*: policy: no server"):
        buffer.sample(1, "train", 2)
