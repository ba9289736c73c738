"""The engines that sample token ids, against vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gymgate.tokens import TokenPolicy
from gymgate.tokens.engines import HuggingFaceEngine, VLLMCompletionsEngine, VLLMGenerateEngine
from support.conversations import TOOLS

torch = pytest.importorskip("torch", reason="needs torch: run ./dev engine")

pytestmark = pytest.mark.timeout(500)  # the first test waits for the server

HTTP = [VLLMGenerateEngine, VLLMCompletionsEngine]
QUESTION = [{"role": "user", "content": "Name three animals that live in the sea."}]


def recomputed(model: Any, prompt: list[int], sampled: list[int], temperature: float) -> list[float]:
    """The model's logprob of each sampled id."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits.float() / temperature, -1)
    values: list[float] = chosen.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()
    return values


@pytest.mark.parametrize("kind", HTTP)
async def test_logprobs_are_the_models(kind: Any, vllm_url: str, model: Any, renderer: Any) -> None:
    engine, prompt = kind(vllm_url), renderer.render_ids(QUESTION, add_generation_prompt=True)
    stop = renderer.get_stop_token_ids()
    sampling = {"max_tokens": 24, "temperature": 0.8, "top_p": 1.0, "top_k": -1, "stop_token_ids": stop}
    samples = await asyncio.gather(*(engine.generate(prompt, sampling, session="s") for _ in range(4)))
    await engine.close()
    for sample in samples:
        assert sample.logprobs == pytest.approx(recomputed(model, prompt, sample.token_ids, 0.8), abs=1e-3)
        assert (sample.finish_reason == "stop") == (sample.token_ids[-1] in stop)
        assert len(sample.token_ids) == 24 or sample.finish_reason == "stop"
    assert len({tuple(sample.token_ids) for sample in samples}) > 1


async def test_greedy_engines_agree(vllm_url: str, model: Any, renderer: Any) -> None:
    """Both routes of vLLM and the model in this process."""
    prompt = renderer.render_ids(QUESTION, add_generation_prompt=True)
    sampling = {"max_tokens": 16, "temperature": 0, "stop_token_ids": renderer.get_stop_token_ids()}
    remote = [kind(vllm_url) for kind in HTTP]
    engines = [*remote, HuggingFaceEngine(model)]
    samples = [await engine.generate(prompt, sampling, session="s") for engine in engines]
    for engine in remote:
        await engine.close()
    assert len({tuple(sample.token_ids) for sample in samples}) == 1
    assert len({sample.finish_reason for sample in samples}) == 1


@pytest.mark.parametrize("kind", HTTP)
async def test_an_answer_without_a_bound_may_fill_the_context(
    kind: Any, vllm_url: str, renderer: Any
) -> None:
    """vLLM's default of 16 ids would refuse this request."""
    engine, prompt = kind(vllm_url), renderer.render_ids(QUESTION, add_generation_prompt=True)
    stop = renderer.get_stop_token_ids()
    # Greedy, for a sampled answer may fill the context, which takes minutes.
    sampling = {"min_tokens": 20, "stop_token_ids": stop, "temperature": 0}
    sample = await engine.generate(prompt, sampling, session="s")
    await engine.close()
    assert len(sample.token_ids) >= 20


@pytest.mark.parametrize("kind", HTTP)
async def test_a_conversation_with_a_tool_is_one_segment(kind: Any, vllm_url: str, renderer: Any) -> None:
    """Each answer is cut at 24 ids or ends by itself; both times the next prompt extends the sampled ids."""
    engine = kind(vllm_url)
    policy = TokenPolicy(engine, renderer, sampling={"temperature": 1.0, "max_tokens": 24})
    conversation = policy.conversation()
    messages: list[Any] = [
        {"role": "user", "content": "Search for the record of Ada, then say what you found."}
    ]
    for _ in range(3):
        answer = await conversation({"messages": messages, "tools": TOOLS})
        message = answer["choices"][0]["message"]
        messages += [message, {"role": "tool", "tool_call_id": "none", "content": "no such record"}]
    await engine.close()
    (segment,) = conversation.segments
    sampled = sum(len(turn.completion_ids) for turn in conversation.turns)
    assert sum(segment.mask) == sampled
    assert all(
        (value is not None) == bool(mask)
        for value, mask in zip(segment.logprobs or [], segment.mask, strict=True)
    )


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_call_survives_a_weight_update(mode: str, vllm_url: str, model: Any, renderer: Any) -> None:
    """The call ends with all its ids, whatever the server does with running requests."""
    from benchmarks.engine.weights import FileWeights

    engine, transfer = VLLMGenerateEngine(vllm_url), FileWeights(vllm_url, mode=mode)
    policy = TokenPolicy(engine, renderer)
    prompt = renderer.render_ids(QUESTION, add_generation_prompt=True)
    sampling = {"max_tokens": 80, "ignore_eos": True}
    call = asyncio.create_task(policy.sample(prompt, sampling, session="s"))
    await _running(vllm_url)
    await asyncio.to_thread(transfer.pause)
    await asyncio.to_thread(transfer.send_weights, model.named_parameters())
    await asyncio.to_thread(transfer.resume)
    sample = await call
    await engine.close()
    assert len(sample.token_ids) == len(sample.logprobs or []) == 80
    assert sample.logprobs == pytest.approx(recomputed(model, prompt, sample.token_ids, 1.0), abs=1e-3)


async def _running(url: str) -> None:
    """Wait until the server samples."""
    import aiohttp

    async with aiohttp.ClientSession(url) as session:
        while True:
            async with session.get("/load") as response:
                if (await response.json())["server_load"]:
                    return
