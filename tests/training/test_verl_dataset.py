"""NeMo Gym rows through verl's own dataset factory and data loader, and the example configs through its own check."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("verl", reason="training tests need verl: see docs/training.md")
pytest.importorskip("support.verl_quiet")

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.dataset.rl_dataset import collate_fn

from gymgate.core.config import EnvironmentConfig
from gymgate.core.errors import ConfigError, DataError
from gymgate.gym.preparation import PrepareConfig, prepare_data
from gymgate.integrations.verl.worker import LoopConfig
from gymgate.verl import NeMoGymDataset

EXAMPLES = Path(__file__).parents[2] / "examples/verl"
NAMES = ("math", "workplace", "multi", "megatron")

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("default")]


def data_config(**more: Any) -> DictConfig:
    custom = {"path": "pkg://gymgate.verl", "name": "NeMoGymDataset"}
    return OmegaConf.create({"custom_cls": custom, "shuffle": True, "seed": 1, **more})


def made(files: Any, max_samples: int = -1, **more: Any) -> NeMoGymDataset:
    config = data_config(files=files, **more)
    dataset = create_rl_dataset(config.files, config, None, None, max_samples=max_samples)
    assert isinstance(dataset, NeMoGymDataset)
    return dataset


ITEMS = [
    {"role": "user", "content": "what was it?"},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "42"},
]


@pytest.fixture
def own_rows(tmp_path: Path) -> str:
    rows = [
        {
            "responses_create_params": {"input": ITEMS, "top_k": 5, "parallel_tool_calls": False},
            "agent_ref": {"type": "responses_api_agents", "name": f"agent_{n}"},
            "expected": {"nested": [n, None]},
        }
        for n in range(6)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.mark.gym
def test_what_gymgate_data_prepare_leaves_is_read(tmp_path: Path) -> None:
    """Raw rows put to a prompt, each for its agent."""
    raw, prompt = tmp_path / "raw.jsonl", tmp_path / "prompt.yaml"
    raw.write_text(
        "".join(json.dumps({"question": f"{n} + 1?", "expected_answer": f"{n + 1}"}) + "\n" for n in range(3))
    )
    prompt.write_text("system: Be brief.\nuser: 'Solve: {question}'\n")
    environment = EnvironmentConfig(name="math_with_judge")
    prepare_data(PrepareConfig(environment=environment, input=str(raw), prompt=str(prompt)), tmp_path / "out")
    dataset = made(str(tmp_path / "out" / "train.jsonl"))
    assert len(dataset) == 3
    item = dataset[2]
    assert [message["content"] for message in item["raw_prompt"]] == ["Be brief.", "Solve: 2 + 1?"]
    assert item["data_source"] == "math_with_judge_simple_agent"
    assert json.loads(item["nemo_gym_row"])["expected_answer"] == "3"


def test_a_row_is_kept_whole(own_rows: str) -> None:
    """Items that are no messages, parameters, nulls; blank lines count for nothing."""
    dataset = made(own_rows)
    assert len(dataset) == 6
    item = dataset[3]
    assert item["raw_prompt"] == ITEMS
    assert (item["index"], item["data_source"], item["environment"]) == (3, "agent_3", "")
    row = json.loads(item["nemo_gym_row"])
    assert row["expected"] == {"nested": [3, None]}
    assert row["responses_create_params"] == {"input": ITEMS, "top_k": 5, "parallel_tool_calls": False}
    with pytest.raises(IndexError):
        dataset[6]


@pytest.mark.parametrize("workers", [0, 2])
def test_verls_data_loader_takes_it(own_rows: str, workers: int) -> None:
    """Shuffled, in batches, by processes of the loader's own; its position is saved and taken up again."""
    dataset = made([own_rows, own_rows])

    def loader() -> StatefulDataLoader:
        sampler = create_rl_sampler(data_config(), dataset)
        return StatefulDataLoader(
            dataset, batch_size=4, num_workers=workers, collate_fn=collate_fn, sampler=sampler, drop_last=True
        )

    first = loader()
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    rest = [batch["index"].tolist() for batch in batches]
    again = loader()
    again.load_state_dict(state)
    assert [batch["index"].tolist() for batch in again] == rest
    assert sorted(index for batch in loader() for index in batch["index"]) == list(range(12))
    assert pickle.loads(pickle.dumps(dataset))[0]["raw_prompt"] == ITEMS


def test_what_cannot_be_rows_is_said(own_rows: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl"):
        made(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="JSONL"):
        made([])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no rows"):
        made(str(tmp_path / "empty.jsonl"))


@pytest.mark.gym
def test_environments_by_weight_and_in_turn() -> None:
    """Packaged data of two environments, 5 rows each."""
    in_turn = made({"mcqa": "example", "math_with_judge": {"data": "example"}})
    assert [in_turn[n]["data_source"] for n in range(10)] == ["mcqa"] * 5 + ["math_with_judge"] * 5
    files = {"mcqa": {"data": "example", "weight": 9}, "math_with_judge": "example"}
    drawn = made(files, nemo_gym={"seed": 3})
    counts = Counter(drawn[n]["environment"] for n in range(len(drawn)))
    assert counts["math_with_judge"] == 5
    assert counts["mcqa"] > 15
    again = made(files, nemo_gym={"seed": 3})
    assert [again[n]["environment"] for n in range(20)] == [drawn[n]["environment"] for n in range(20)]
    assert len(made(files, max_samples=4)) == 4
    with pytest.raises(ConfigError, match=r"\bwait\b"):
        made({"mcqa": {"wait": 1}})
    with pytest.raises(ConfigError, match="weight"):
        made({"mcqa": {"data": "example", "weight": 0}, "math_with_judge": "example"})
    with pytest.raises(ConfigError, match="mcqaa"):
        made({"mcqaa": "example"})


@pytest.mark.gym
@pytest.mark.parametrize("name", NAMES)
def test_an_example_config_composes_and_its_rows_are_there(name: str) -> None:
    with initialize_config_dir(str(EXAMPLES), version_base=None):
        config = compose(name)
    assert config.trainer.use_v1
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert actor.strategy == ("megatron" if name == "megatron" else "fsdp")
    assert config.trainer.v1.sampler.custom_sampler.name == "NeMoGymReplayBuffer"
    (entry,) = yaml.safe_load((EXAMPLES / f"agents/{name}.yaml").read_text())
    ours = {field: value for field, value in entry.items() if field in LoopConfig.names()}
    assert entry.keys() - ours.keys() == {"name", "_target_"}
    assert entry["name"] == config.actor_rollout_ref.rollout.agent.default_agent_loop
    stack = LoopConfig.model_validate(ours).stack
    assert {environment.name for environment in stack.environments} == {*config.data.train_files}
    packaged = dict.fromkeys(config.data.val_files, "example")
    assert len(create_rl_dataset(packaged, config.data, None, None)) == 5 * len(packaged)


def test_the_launcher_starts_verl_with_the_config() -> None:
    """Up to verl's own main: Hydra prints the job's config instead of running it."""
    done = subprocess.run(
        [str(EXAMPLES / "train.sh"), "multi", "trainer.total_training_steps=3", "--cfg", "job"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    config = yaml.safe_load(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    assert config["actor_rollout_ref"]["rollout"]["agent"]["agent_loop_config_path"].endswith(
        "agents/multi.yaml"
    )
    assert config["trainer"]["total_training_steps"] == 3
    assert config["data"]["train_files"]["workplace_assistant"]["weight"] == 2
