"""TRL's `HarnessRolloutWorker` in its own process, on NeMo Gym rollouts that a real vLLM server samples.

vLLM's pins differ from OpenEnv's, so the server runs in another environment and this test talks to it over HTTP:

    ./dev engine python -m benchmarks.engine.server --port 8000
    GYMGATE_VLLM_URL=http://127.0.0.1:8000 ./dev inspect -m heavy tests/openenv/test_openenv_vllm.py
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl", reason="needs trl: run ./dev inspect")

from accelerate import PartialState  # noqa: E402
from benchmarks.engine.model import real_model  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker  # noqa: E402

from gymgate import open_rows  # noqa: E402
from gymgate.openenv import NeMoGymSessionFactory  # noqa: E402
from gymgate.trl import NeMoGymSpec  # noqa: E402

ENVIRONMENT = "example_session_state_mgmt"
QWEN3 = Path(trl.__file__).parent / "chat_templates/qwen3.jinja"
URL = os.environ.get("GYMGATE_VLLM_URL", "")

pytestmark = [
    pytest.mark.gym,
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not URL, reason="needs a vLLM server: GYMGATE_VLLM_URL"),
]


def recomputed(ids: list[int]) -> list[float | None]:
    """vLLM's own logprob of each id after those before it."""
    body = {"model": "SmolLM2-135M-Instruct", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    request = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)["choices"][0]["prompt_logprobs"]
    return [each[str(token)]["logprob"] if each else None for token, each in zip(ids, found, strict=True)]


def test_the_worker_delivers_what_vllm_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is too long for the model fails, and its group is left out; the other's ids have vLLM's logprobs."""
    monkeypatch.setattr("trl.experimental.async_grpo.async_rollout_worker.is_vllm_available", lambda: True)
    PartialState()  # a trainer does this
    good = dict(open_rows(ENVIRONMENT)[0].data)
    params = good["responses_create_params"]
    long = {
        **good,
        "responses_create_params": {**params, "input": [{"role": "user", "content": "count " * 20_000}]},
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in (long, good)))
    tokenizer = AutoTokenizer.from_pretrained(real_model())
    spec = NeMoGymSpec(ENVIRONMENT, data=str(rows), score_truncated=True, limits={"timeout_s": 300})
    parsing: Any = AutoTokenizer.from_pretrained(real_model())
    parsing.chat_template = QWEN3.read_text()  # TRL parses answers by it
    worker = HarnessRolloutWorker(
        harness_session_factory=partial(
            NeMoGymSessionFactory, spec, tokenizer, URL, max_completion_length=12
        ),
        model_name="SmolLM2-135M-Instruct",
        dataset=spec.train_dataset,
        reward_funcs=[],
        processing_class=parsing,
        eos_token_ids=[tokenizer.eos_token_id],
        vllm_server_url=URL,
        num_generations=4,
        max_inflight_tasks=4,
        queue_maxsize=8,
    )
    worker.start()
    try:
        samples: list[Any] = []
        while len(samples) < 4:
            worker.check_health(600)
            if worker.rollout_buffer.empty():
                time.sleep(0.1)
            else:
                samples.append(worker.rollout_buffer.get(timeout=60))
    finally:
        worker.stop()
    assert len({sample.group_id for sample in samples}) == 1
    for sample in samples:
        ids, mask = sample.input_ids.tolist(), sample.completion_mask.tolist()
        assert params["input"][-1]["content"] in tokenizer.decode(ids)
        assert "increment_counter" in tokenizer.decode(ids[: mask.index(1)])  # the row's tools are shown
        known = recomputed(ids)
        sampled = [number for number, trained in enumerate(mask) if trained]
        assert sampled
        for number in sampled:
            assert sample.old_log_probs[number] == pytest.approx(known[number], abs=0.02)
        assert sample.metrics["reward"] in (0.0, 1.0)
