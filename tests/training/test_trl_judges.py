"""What GRPOTrainer trains on in an environment whose judge is the policy: what the agent said, and no id of the judge's."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

from trl import GRPOConfig, GRPOTrainer

from gymgate.tokens import Sample
from gymgate.tokens.engines import CallableEngine
from gymgate.trl import NeMoGymSpec
from support.judged_trl import judged
from support.trl_rows import arguments, tiny

pytestmark = [pytest.mark.gym, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]


class Speakers:
    """An engine that knows the judge's prompts from the agent's, and keeps what each of them said and was asked with."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.agent: list[list[int]] = []
        self.asked: dict[str, list[dict[str, Any]]] = {"agent": [], "judge": []}
        self._numbers = itertools.count()

    def sample(self, prompt: list[int], sampling: dict[str, Any]) -> Sample:
        judging = "judge " in self.tokenizer.decode(prompt)
        self.asked["judge" if judging else "agent"].append(sampling)
        number = next(self._numbers)
        text = "yn" * 20 if judging else "abcdefgh"[number % 8] * (1 + number % 4)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        if not judging:
            self.agent.append(ids)
        return Sample(ids, [-1.0] * len(ids), "stop")


class Recording(GRPOTrainer):
    """Keeps the ids of every batch that the loss takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.trained: list[list[int]] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        masks = (made["completion_mask"] * made["tool_mask"]).bool()
        self.trained += [ids[on].tolist() for ids, on in zip(made["completion_ids"], masks, strict=True)]
        return made


def test_a_judge_that_is_the_policy_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge's answers are longer than the agent's and the room of a rollout, and sampled as the judge asks."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    model, tokenizer, renderer = tiny()
    speakers = Speakers(tokenizer)
    environment, rows = judged(tmp_path)
    stack = {"models": {"critic_model": "policy"}}
    engine = CallableEngine(speakers.sample)
    with NeMoGymSpec(environment, data=rows, engine=engine, renderer=renderer, stack=stack) as spec:
        config = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 2}
        trainer = Recording(
            model=model,
            args=GRPOConfig(**arguments(tmp_path / "out", max_completion_length=8, **config)),
            processing_class=tokenizer,
            train_dataset=spec.train_dataset,
            rollout_func=spec.rollout_func,
            reward_funcs=spec.reward_funcs,
        )
        trainer.train()
    assert sorted(trainer.trained) == sorted(speakers.agent)
    assert len(speakers.agent) == 8
    assert len(speakers.asked["judge"]) == 16
    assert {(sent["temperature"], sent["max_tokens"]) for sent in speakers.asked["judge"]} == {(0.25, 90)}
    assert {(sent["temperature"], sent["max_tokens"]) for sent in speakers.asked["agent"]} == {(1.0, 8)}
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [(entry["reward"], entry["nemo_gym/turns"]) for entry in logged] == [(0.5, 1.0)] * 2
