"""A curriculum in a real GRPOTrainer: it draws the rows, learns from their rewards, and goes on from a checkpoint."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

from trl import GRPOTrainer  # noqa: E402

from gymgate.core.errors import ConfigError, PolicyError  # noqa: E402
from gymgate.integrations.trl.batch_curriculum import FILE  # noqa: E402
from gymgate.tokens import Sample  # noqa: E402
from gymgate.tokens.engines import CallableEngine  # noqa: E402
from gymgate.trl import NeMoGymSpec  # noqa: E402
from support.trl_rows import ENVIRONMENT, LETTERS, make_trainer, tiny  # noqa: E402

pytestmark = [pytest.mark.gym, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]

ROWS = str(LETTERS / "data/example.jsonl")


def letters_of(tokenizer: Any) -> CallableEngine:
    """Answer `aaaa`, which fits the rows that ask for an a; each sixth call fails."""
    ids, calls = tokenizer.encode("aaaa", add_special_tokens=False), itertools.count(1)

    def sample(prompt: list[int], sampling: dict[str, Any]) -> Sample:
        if next(calls) % 6 == 0:
            raise PolicyError("out of memory", retryable=False)
        return Sample([*ids, tokenizer.eos_token_id], [-1.0] * (len(ids) + 1), "stop")

    return CallableEngine(sample)


def train(folder: Path, *, steps: int, resume: bool = False) -> Any:
    curriculum = {"target": 0.9, "half_life": 1000}
    with NeMoGymSpec(ENVIRONMENT, data=ROWS, engine=letters_of(tiny()[1]), curriculum=curriculum) as spec:
        saving = {"max_steps": steps, "save_strategy": "steps", "save_steps": 2}
        trainer = make_trainer(GRPOTrainer, spec, folder, **saving)
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer.state.log_history


def test_a_training_measures_its_rows_and_its_checkpoint_goes_on(tmp_path: Path) -> None:
    logged = [entry for entry in train(tmp_path, steps=4) if "reward" in entry]
    assert all(0 <= entry["nemo_gym/curriculum_distance"] <= 0.9 for entry in logged)
    state = json.loads((tmp_path / "checkpoint-4" / FILE).read_text())
    [known] = state["environments"].values()
    counted = sum(passed + failed for passed, failed, _ in known["rows"].values())
    assert state["updates"] == state["draws"] == 4
    assert counted == pytest.approx(4 * 8 - 5, rel=0.02), "five of 32 rollouts failed and taught nothing"

    train(tmp_path, steps=6, resume=True)
    later = json.loads((tmp_path / "checkpoint-6" / FILE).read_text())
    assert later["updates"] == later["draws"] == 6


def test_a_trainer_that_takes_rows_ahead_is_refused() -> None:
    with (
        NeMoGymSpec(ENVIRONMENT, data=ROWS, curriculum={}) as spec,
        pytest.raises(ConfigError, match="AsyncGRPOTrainer"),
    ):
        spec.rollout_worker(None, None)
