"""What GRPOTrainer makes of rollouts that are sampled in its process; tests/engine has those that vLLM samples."""

from __future__ import annotations

import gc
import itertools
import math
import os
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

from trl import GRPOTrainer  # noqa: E402

from gymgate.core.errors import ConfigError, PolicyError  # noqa: E402
from gymgate.tokens import Sample  # noqa: E402
from gymgate.tokens.engines import CallableEngine  # noqa: E402
from gymgate.trl import NeMoGymSpec  # noqa: E402
from support.trl_rows import ENVIRONMENT, ONE_LETTER, make_trainer, tiny  # noqa: E402

pytestmark = [pytest.mark.gym, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]


class Recording(GRPOTrainer):
    """Keeps what every batch of rollouts became."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[dict[str, Any]] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        self.batches.append(made)
        return made


@pytest.fixture(scope="module")
def spec() -> Iterator[NeMoGymSpec]:
    """One stack for the module; each test says what samples."""
    with NeMoGymSpec(ENVIRONMENT, data=ONE_LETTER, limits={"timeout_s": 60}) as made:
        yield made


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def trainer_of(spec: NeMoGymSpec, folder: Path, **more: Any) -> Recording:
    trainer: Recording = make_trainer(Recording, spec, folder, **more)
    return trainer


def scripted(tokenizer: Any) -> CallableEngine:
    """By turns: a good answer, one half as good, an answer cut short, a failure."""
    good, half, cut = (tokenizer.encode(text, add_special_tokens=False) for text in ("aaaa", "abab", "aaab"))
    end, calls = tokenizer.eos_token_id, itertools.count()

    def sample(prompt: list[int], sampling: dict[str, Any]) -> Sample:
        number = next(calls) % 4
        if number == 3:
            raise PolicyError("out of memory", retryable=False)
        ids = [good, half, cut][number] + [end] * (number < 2)
        return Sample(ids, [-1.0] * len(ids), "stop" if number < 2 else "length")

    return CallableEngine(sample)


def test_unscored_rollouts_enter_neither_baseline_nor_loss(spec: NeMoGymSpec, tmp_path: Path) -> None:
    """In a group, the failed and the truncated have advantage 0 and no trained token; the others are compared with each other."""
    tokenizer = tiny()[1]
    spec.engine = scripted(tokenizer)
    trainer = trainer_of(spec, tmp_path, max_steps=3)
    trainer.train()
    mixed = 0
    for batch in trainer.batches:
        texts = tokenizer.batch_decode(batch["completion_ids"], skip_special_tokens=True)
        trained = (batch["completion_mask"] * batch["tool_mask"]).bool().any(1)
        rewards = [
            {"aaaa": 1.0, "abab": 0.5}[text] if on else None for text, on in zip(texts, trained, strict=True)
        ]
        for start in range(0, 8, 4):
            group, advantages = rewards[start : start + 4], batch["advantages"][start : start + 4].tolist()
            scored = torch.tensor([reward for reward in group if reward is not None])
            spread = scored.std() if len(scored) > 1 else torch.tensor(0.0)
            mixed += 0 < len(scored) < 4 and bool(spread > 0)
            for reward, advantage in zip(group, advantages, strict=True):
                wanted = 0.0 if reward is None else float((reward - scored.mean()) / (spread + 1e-4))
                assert advantage == pytest.approx(wanted, abs=1e-3)
    assert mixed
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["reward"] for entry in logged] == [0.75] * 3
    assert {entry["nemo_gym/letter_share/failed_policy"] for entry in logged} == {0.25}
    assert {entry["nemo_gym/letter_share/truncated"] for entry in logged} == {0.25}


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_parts_of_a_reward_have_their_weights_and_a_missing_one_is_none(
    aggregation: str, tmp_path: Path
) -> None:
    """In a group: two answers, an empty one, which does not start with any letter, and a failure."""
    tokenizer = tiny()[1]
    answers, end, calls = ("aa", "ba", ""), tokenizer.eos_token_id, itertools.count()

    def sample(prompt: list[int], sampling: dict[str, Any]) -> Sample:
        if (number := next(calls) % 4) == 3:
            raise PolicyError("out of memory", retryable=False)
        ids = [*tokenizer.encode(answers[number], add_special_tokens=False), end]
        return Sample(ids, [-1.0] * len(ids), "stop")

    with NeMoGymSpec(
        ENVIRONMENT, data=ONE_LETTER, engine=CallableEngine(sample), reward_parts={"start": 0.5}
    ) as spec:
        with pytest.raises(ConfigError, match=r"reward_weights=spec\.reward_weights"):
            trainer_of(spec, tmp_path, max_steps=1).train()
        trainer = trainer_of(
            spec,
            tmp_path,
            max_steps=1,
            reward_weights=spec.reward_weights,
            multi_objective_aggregation=aggregation,
        )
        trainer.train()
    (batch,) = trainer.batches
    texts = tokenizer.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    failed = [not any(mask) for mask in (batch["completion_mask"] * batch["tool_mask"]).tolist()]
    own = [
        None if bad else text.count("a") / max(len(text), 1) for text, bad in zip(texts, failed, strict=True)
    ]
    start = [
        None if bad or not text else float(text[0] == "a") for text, bad in zip(texts, failed, strict=True)
    ]
    assert (failed.count(True), own.count(None), start.count(None)) == (2, 2, 4)
    kept = {
        name: [None if math.isnan(each) else each for each in values]
        for name, values in trainer._logs["rewards"].items()
    }
    assert kept == {"nemo_gym_reward": own, "start": start}
    for row, (first, second) in enumerate(zip(own, start, strict=True)):
        if first is None:
            assert batch["advantages"][row] == 0
        elif second is None:  # what it has counts
            assert batch["advantages"][row] < 0
    (logged,) = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert logged["rewards/start/mean"] == logged["nemo_gym/letter_share/reward/start"] == 0.5
    assert logged["rewards/nemo_gym_reward/mean"] == logged["nemo_gym/reward"] == 0.5


def test_a_batch_without_any_score_changes_no_weight(spec: NeMoGymSpec, tmp_path: Path) -> None:
    cut = tiny()[1].encode("aaab", add_special_tokens=False)
    spec.engine = CallableEngine(lambda prompt, sampling: Sample(cut, [-1.0] * len(cut), "length"))
    trainer = trainer_of(spec, tmp_path, max_steps=2, learning_rate=0.1)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    for old, new in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_an_evaluation_counts_truncated_rollouts(spec: NeMoGymSpec, tmp_path: Path) -> None:
    """They teach nothing; but a policy that overruns its context must not score higher for it."""
    tokenizer = tiny()[1]
    cut, good = (tokenizer.encode(text, add_special_tokens=False) for text in ("abbb", "aaaa<|im_end|>"))
    calls = itertools.count()

    def sample(prompt: list[int], sampling: dict[str, Any]) -> Sample:
        cuts = next(calls) % 2
        ids = cut if cuts else good
        return Sample(ids, [-1.0] * len(ids), "length" if cuts else "stop")

    spec.engine = CallableEngine(sample)
    trainer = trainer_of(spec, tmp_path, per_device_eval_batch_size=4, max_steps=1)
    trainer.train()
    assert [entry["reward"] for entry in trainer.state.log_history if "reward" in entry] == [1.0]
    logged = trainer.evaluate(spec.train_dataset.select([0]))
    assert logged["eval_reward"] == logged["eval_nemo_gym/reward"] == pytest.approx(0.625)
    assert logged["eval_nemo_gym/truncated"] == 0.5


def test_batches_of_failures_end_the_training_with_the_reason(spec: NeMoGymSpec, tmp_path: Path) -> None:
    def broken(prompt: list[int], sampling: dict[str, Any]) -> Sample:
        raise PolicyError("out of memory", retryable=False)

    spec.engine = CallableEngine(broken)
    trainer = trainer_of(spec, tmp_path, max_steps=9)
    with pytest.raises(PolicyError, match=r"\b4 batches .*out of memory"):
        trainer.train()
    assert trainer.state.global_step == 3


def test_a_killed_stack_costs_a_batch_and_is_started_again(spec: NeMoGymSpec, tmp_path: Path) -> None:
    good, killed = tiny()[1].encode("aaaa<|im_end|>", add_special_tokens=False), []

    def sample(prompt: list[int], sampling: dict[str, Any]) -> Sample:
        if not killed:
            killed.append(spec._runner._stack.value._lease.daemon.pid)
            os.kill(killed[0], signal.SIGKILL)
        return Sample(good, [-1.0] * len(good), "stop")

    spec.engine = CallableEngine(sample)
    trainer = trainer_of(spec, tmp_path, max_steps=2)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "nemo_gym/failed" in entry]
    assert [entry["nemo_gym/letter_share/failed_infrastructure"] for entry in logged] == [1, 0]
    assert logged[1]["nemo_gym/reward"] == 1


def test_a_deadline_ends_sampling_before_the_trainer_goes_on(tmp_path: Path) -> None:
    """An answer that would take minutes: the loss is computed in training mode, by a model that nobody samples from."""
    with NeMoGymSpec(ENVIRONMENT, data=ONE_LETTER, limits={"timeout_s": 2}) as spec:
        trainer = trainer_of(spec, tmp_path, max_steps=2, max_completion_length=400)
        trainer.train_modes, sampling, sampled_in_loss = [], [], []
        generate, loss = trainer.model.generate, trainer.compute_loss

        def slowly(*_: Any) -> None:
            if sampling:
                time.sleep(0.05)  # as a large model samples

        def generating(**given: Any) -> Any:
            sampling.append(1)
            try:
                return generate(**{**given, "min_new_tokens": given["max_new_tokens"]})
            finally:
                sampling.pop()

        def computing(model: Any, *args: Any, **more: Any) -> Any:
            trainer.train_modes.append(model.training)
            sampled_in_loss.extend(sampling)
            return loss(model, *args, **more)

        trainer.model.model.embed_tokens.register_forward_hook(slowly)
        trainer.model.generate, trainer.compute_loss = generating, computing
        trainer.train()
    assert trainer.train_modes == [True, True]
    assert not sampled_in_loss
    logged = [entry for entry in trainer.state.log_history if "nemo_gym/failed_timeout" in entry]
    assert [entry["nemo_gym/failed_timeout"] for entry in logged] == [1, 1]
    assert all(entry["step_time"] < 10 for entry in logged)


def test_a_spec_keeps_no_model_of_a_trainer_that_is_gone(spec: NeMoGymSpec, tmp_path: Path) -> None:
    spec.engine = None
    trainer = trainer_of(spec, tmp_path, max_steps=1)
    trainer.train()
    model = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert model() is None


class ScriptedVLLM:
    """TRL's `VLLMGeneration` in colocate mode, with a vLLM that gives one answer; writes down what it is asked for."""

    mode, tensor_parallel_size, enable_sleep_mode = "colocate", 1, True

    def __init__(self, answer: list[int]) -> None:
        self.answer, self.calls, self._llm_weights_sleeping = answer, [], True
        self.model_config = SimpleNamespace(max_model_len=64)
        self.llm = SimpleNamespace(
            llm_engine=self,
            wake_up=lambda tags: self.calls.append(f"wake {tags[0]}"),
            sleep=lambda level: self.calls.append(f"sleep {level}"),
        )
        self.requests: list[str] = []

    def sync_weights(self) -> None:
        self.calls.append("weights")
        self._llm_weights_sleeping = False

    def add_request(self, request_id: str, prompt: Any, parameters: Any) -> None:
        self.requests.append(request_id)

    def abort_request(self, request_ids: list[str]) -> None:
        self.calls.append("abort")

    def step(self) -> list[Any]:
        logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in self.answer]
        sampled = SimpleNamespace(token_ids=self.answer, logprobs=logprobs, finish_reason="stop")
        ended, self.requests = self.requests, []
        return [SimpleNamespace(request_id=name, finished=True, outputs=[sampled]) for name in ended]


def test_vllm_in_the_trainers_process_is_awake_only_while_it_samples(
    spec: NeMoGymSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL sends weights after a step, gymgate before a second evaluation: weights are gone when vLLM has slept."""
    monkeypatch.setattr("gymgate.tokens.engines.colocated._parameters", dict)
    spec.engine = None
    trainer = trainer_of(spec, tmp_path, max_steps=2, per_device_eval_batch_size=4)
    vllm = ScriptedVLLM(tiny()[1].encode("aaaa<|im_end|>", add_special_tokens=False))
    trainer.use_vllm, trainer.args.vllm_mode, trainer.vllm_generation = True, "colocate", vllm
    trainer._last_loaded_step = -1
    trainer.train()
    for _ in range(2):
        trainer.evaluate(spec.train_dataset.select([0]))
    batch = ["weights", "wake kv_cache", "sleep 2"]
    assert vllm.calls == batch * 4
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [(entry["reward"], entry["nemo_gym/failed"]) for entry in logged] == [(1.0, 0), (1.0, 0)]
