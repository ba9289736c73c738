"""A curriculum in verl's v1 trainer and its data loader's checkpoints, over real NeMo Gym environments, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("verl", reason="training tests need verl: see docs/training.md")
pytest.importorskip("support.verl_quiet")

from omegaconf import DictConfig
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn

from gymgate.core.errors import ConfigError
from gymgate.integrations.verl.dataset import NeMoGymDataset
from gymgate.integrations.verl.reports import AT
from support.verl_parts import make_config
from support.verl_trainer import QUEUE, CPUTrainer, manager_of, running_queue

pytestmark = [pytest.mark.gym, pytest.mark.timeout(500), pytest.mark.filterwarnings("default")]

BLEND = ("workplace_assistant", "mcqa")
PLAN = ("right", "wrong", "broken")
"""Of each prompt: in turn, so that a group of three has one of each."""
BATCH, STEPS = 4, 2


def config_of(folder: Path) -> DictConfig:
    config = make_config(
        folder,
        BLEND,
        f"actor_rollout_ref.rollout.n={len(PLAN)}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        f"data.train_batch_size={BATCH}",
        *QUEUE,
        f"trainer.total_training_steps={STEPS}",
        "+data.nemo_gym.curriculum={target:0.5}",
        "+data.nemo_gym.seed=3",
    )
    config.data.val_files = {"mcqa": "example"}
    return config


def dataset_of(config: DictConfig, files: str = "train_files") -> NeMoGymDataset:
    dataset = create_rl_dataset(config.data[files], config.data, None, None)
    assert isinstance(dataset, NeMoGymDataset)
    return dataset


def loader_of(config: DictConfig, dataset: NeMoGymDataset, workers: int = 0) -> StatefulDataLoader:
    return StatefulDataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=workers,
        collate_fn=collate_fn,
        sampler=create_rl_sampler(config.data, dataset),
    )


def test_a_training_measures_its_rows_and_its_checkpoint_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each group one rollout passes, one does not, and one fails, which teaches nothing."""
    config, log = config_of(tmp_path), tmp_path / "log.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    with running_queue(config):
        trainer = CPUTrainer(config)
        trainer.init()
        trainer.fit(manager_of(config, BLEND, PLAN))
    curriculum = trainer.train_dataset.curriculum
    state = curriculum.state()
    assert (state["updates"], trainer.val_dataset.curriculum) == (STEPS, None)
    known = [counts for each in state["environments"].values() for counts in each["rows"].values()]
    assert sum(passed + failed for passed, failed, _ in known) == pytest.approx(2 * BATCH * STEPS, rel=0.02)
    assert all(passed == pytest.approx(failed) for passed, failed, _ in known)
    for line in log.read_text().splitlines():
        logged = json.loads(line)["data"]
        assert (logged["nemo_gym/curriculum_flat_groups"], logged["nemo_gym/curriculum_distance"]) == (0, 0)

    again = dataset_of(config)
    loader = loader_of(config, again)
    loader.load_state_dict(trainer.train_dataloader.state_dict())
    drawn = next(iter(loader))
    assert again.curriculum is not None
    assert again.curriculum.state() == {**state, "draws": state["draws"] + 1}
    assert len({*drawn[AT]}) == len(drawn[AT]) == 2  # what is left of the ten rows


def test_the_weights_of_a_blend_hold_and_validation_is_not_drawn(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    dataset = dataset_of(config)
    items = dataset.__getitems__(range(len(dataset)))
    plain = dataset_of(config, "val_files")
    assert [item["environment"] for item in items] == [BLEND[0]] * 5 + [BLEND[1]] * 5
    assert len({item["nemo_gym_row"] for item in items}) == len(dataset)
    assert not any(AT in plain[number] for number in range(len(plain)))


def test_rows_of_several_files_stay_apart(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    for name, count in (("a", 3), ("b", 2)):
        rows = [
            {"agent_ref": {"name": name}, "responses_create_params": {"input": f"{name}{number}"}}
            for number in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.data.train_files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    dataset = dataset_of(config)
    items = dataset.__getitems__(range(5))
    texts = [json.loads(item["nemo_gym_row"])["responses_create_params"]["input"] for item in items]
    assert (sorted(texts[:3]), sorted(texts[3:])) == (["a0", "a1", "a2"], ["b0", "b1"])
    dataset.learn([("g", items[4][AT], 1.0), ("g", items[4][AT], 0.0), ("h", items[0][AT], None)])
    assert dataset.curriculum is not None
    environments = dataset.curriculum.state()["environments"]
    assert (len(environments["0"]["rows"]), len(environments["1"]["rows"])) == (0, 1)


def test_what_cannot_have_a_curriculum_says_so(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match="dataloader_num_workers=0"):
        next(iter(loader_of(config, dataset_of(config), workers=1)))
    config.data.val_files = config.data.train_files
    with pytest.raises(ConfigError, match=r"other data\.val_files"):
        dataset_of(config)
