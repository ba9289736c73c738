"""The same client code against a stock vLLM server, where one is named.

    VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --port 8000
    GYMGATE_VLLM_URL=http://127.0.0.1:8000 ./dev train tests/training/test_tokens_vllm.py

Needs a GPU for the server and the served model's tokenizer here.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any
from urllib.request import Request, urlopen

import pytest

URL = os.environ.get("GYMGATE_VLLM_URL", "")
pytestmark = [
    pytest.mark.skipif(not URL, reason="GYMGATE_VLLM_URL names no vLLM server (needs a GPU)"),
    pytest.mark.timeout(600),
]

from token_conversations import TOOLS  # noqa: E402

from gymgate.tokens import TokenPolicy  # noqa: E402
from gymgate.tokens.engines import VLLMCompletionsEngine, VLLMGenerateEngine  # noqa: E402


@pytest.fixture(scope="module")
def model() -> str:
    with urlopen(f"{URL}/v1/models", timeout=30) as answer:
        name: str = json.load(answer)["data"][0]["id"]
        return name


@pytest.fixture(scope="module")
def renderer(model: str) -> Any:
    from renderers import create_renderer
    from transformers import AutoTokenizer

    return create_renderer(AutoTokenizer.from_pretrained(model))


@pytest.mark.parametrize("kind", [VLLMGenerateEngine, VLLMCompletionsEngine])
async def test_a_conversation_with_a_tool_is_one_segment(kind: Any, model: str, renderer: Any) -> None:
    engine = kind(URL, model=model)
    policy = TokenPolicy(engine, renderer, sampling={"temperature": 1.0, "max_tokens": 256})
    conversation = policy.conversation()
    messages: list[Any] = [
        {"role": "user", "content": "Search for the record of Ada, then say what you found."}
    ]
    for _ in range(3):
        answer = await conversation({"messages": messages, "tools": TOOLS})
        said = answer["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "no such record"}
            for call in said.get("tool_calls", [])
        ]
        messages += [said, *(results or [{"role": "tool", "tool_call_id": "none", "content": "go on"}])]
    await engine.close()
    (segment,) = conversation.segments
    sampled = sum(len(turn.completion_ids) for turn in conversation.turns)
    assert sum(segment.mask) == sampled
    assert all(
        (value is not None) == bool(mask) for value, mask in zip(segment.logprobs, segment.mask, strict=True)
    )


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_call_survives_a_pause(mode: str, model: str, renderer: Any) -> None:
    engine = VLLMGenerateEngine(URL, model=model)
    policy = TokenPolicy(engine, renderer)
    prompt = renderer.render_ids(
        [{"role": "user", "content": "Count to a thousand."}], add_generation_prompt=True
    )
    call = asyncio.create_task(
        policy.sample(prompt, {"max_tokens": 400, "ignore_eos": True, "min_tokens": 400}, session="s")
    )
    for _ in range(5):  # the first may come before the call does
        await asyncio.to_thread(_post, f"pause?mode={mode}")
        await asyncio.to_thread(_post, "resume")
    sample = await call
    await engine.close()
    assert len(sample.token_ids) == len(sample.logprobs or []) == 400


def _post(route: str) -> None:
    with urlopen(Request(f"{URL}/{route}", method="POST"), timeout=120) as answer:
        assert answer.status == 200
