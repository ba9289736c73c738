"""TRL's `HarnessRolloutWorker`, in its own process, on NeMo Gym rollouts with tool calls.

vLLM is not installed here, which the worker checks; the token server answers its route.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest

trl = pytest.importorskip("trl", reason="needs trl: run ./dev inspect")

from accelerate import PartialState  # noqa: E402
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker  # noqa: E402

from gymgate.openenv import NeMoGymSessionFactory  # noqa: E402
from gymgate.tokens import TokenTurn, assemble  # noqa: E402
from gymgate.trl import NeMoGymSpec  # noqa: E402
from support.token_server import ENVIRONMENT, TOKENIZER, TokenServer  # noqa: E402

pytestmark = [pytest.mark.gym, pytest.mark.timeout(600)]

PLANS = ("calls", "answer", "refuse", "calls")
QWEN3 = Path(trl.__file__).parent / "chat_templates/qwen3.jinja"


def tokenizer() -> Any:
    """The tiny tokenizer with a template for which TRL knows how to parse answers."""
    from examples.trl.tiny_policy import make_tokenizer

    made = make_tokenizer()
    made.chat_template = QWEN3.read_text()
    return made


def worker_of(server: TokenServer, **more: Any) -> HarnessRolloutWorker:
    PartialState()  # a trainer does this
    spec = NeMoGymSpec(ENVIRONMENT, rows=1, renderer="qwen3", limits={"timeout_s": 120})
    wanted = {"num_generations": 4, "max_inflight_tasks": 4, **more}
    return HarnessRolloutWorker(
        harness_session_factory=partial(NeMoGymSessionFactory, spec, TOKENIZER, server.url),
        model_name="tiny",
        dataset=spec.train_dataset,
        reward_funcs=[],
        processing_class=tokenizer(),
        eos_token_ids=[TOKENIZER.eos_token_id],
        vllm_server_url=server.url,
        **wanted,
    )


def rollouts(turns: list[TokenTurn]) -> list[list[TokenTurn]]:
    """The turns of each rollout; equal rollouts differ in nothing, so any that continues will do."""
    found: list[list[TokenTurn]] = []
    for turn in turns:
        earlier = next(
            (
                each
                for each in found
                if list(turn.prompt_ids[: len(each[-1].prompt_ids) + len(each[-1].completion_ids)])
                == [*each[-1].prompt_ids, *each[-1].completion_ids]
            ),
            None,
        )
        if earlier is None:
            found.append([turn])
        else:
            earlier.append(turn)
    return found


def test_the_worker_delivers_what_was_sampled(
    token_server: TokenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of four: two rollouts call tools, one is wrong, one fails and is in no baseline."""
    monkeypatch.setattr("trl.experimental.async_grpo.async_rollout_worker.is_vllm_available", lambda: True)
    token_server.begin = lambda number: PLANS[number % len(PLANS)]
    token_server.together = threading.Barrier(len(PLANS))
    worker = worker_of(token_server, queue_maxsize=8)
    worker.start()
    try:
        samples = []
        while len(samples) < 3:
            worker.check_health(300)
            if worker.rollout_buffer.empty():
                time.sleep(0.1)
            else:
                samples.append(worker.rollout_buffer.get(timeout=60))
        seen = list(token_server.turns)
    finally:
        token_server.together.abort()
        worker.stop()
    assert {sample.group_id for sample in samples} == {0}
    rewards = [sample.metrics["reward"] for sample in samples]
    assert sorted(rewards) == [0.0, 1.0, 1.0]
    assert samples[0].metrics["reward_std"] == pytest.approx(numpy.std([0.0, 1.0, 1.0]))
    assert sum(sample.advantage for sample in samples) == pytest.approx(0, abs=1e-5)
    segments = [segment for turns in rollouts(seen) for segment in assemble(turns)]
    for sample, reward in zip(samples, rewards, strict=True):
        input_ids = sample.input_ids.tolist()
        segment = next(each for each in segments if [*each.prompt_ids, *each.completion_ids] == input_ids)
        prompt = len(segment.prompt_ids)
        assert sample.completion_mask.tolist() == [0] * prompt + segment.mask
        known = [value or 0.0 for value in segment.logprobs or []]
        assert sample.old_log_probs.tolist() == pytest.approx([0.0] * prompt + known)
        assert (0 in segment.mask) == (reward == 1.0)  # tool results are shown, not trained on
    called = [sample.metrics["tools/call_frequency"] for sample in samples]
    assert sorted(called) == [0.0, 3.0, 3.0]


def test_a_stack_that_does_not_start_ends_the_worker(
    token_server: TokenServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trl.experimental.async_grpo.async_rollout_worker.is_vllm_available", lambda: True)
    worker = worker_of(token_server)
    spec = worker._loop_kwargs["harness_session_factory"].args[0]
    stack = spec.settings.stack.model_copy(
        update={"env_vars": ("GYMGATE_NOT_SET",), "start_timeout_s": 0.001}
    )
    spec.settings = spec.settings.model_copy(update={"stack": stack})
    with pytest.raises(RuntimeError, match="exited during init"):
        worker.start()
    assert "gymgate.core.errors." in capfd.readouterr().err
