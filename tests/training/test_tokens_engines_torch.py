"""The engine over a model in this process, and what every engine refuses; tests/engine has them over vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")

from examples.trl.tiny_policy import make_model, make_renderer, make_tokenizer  # noqa: E402

from gymgate.core.errors import PolicyError, TokenDataError  # noqa: E402
from gymgate.tokens import TokenPolicy  # noqa: E402
from gymgate.tokens.engines import (  # noqa: E402
    CallableEngine,
    HuggingFaceEngine,
    Sample,
    SGLangEngine,
    VLLMCompletionsEngine,
    VLLMGenerateEngine,
)

PROMPT = [1, 29, 27, 13, 26, 36, 16, 17, 2]
HTTP = (VLLMGenerateEngine, VLLMCompletionsEngine, SGLangEngine)


@pytest.fixture(scope="module")
def tiny() -> Any:
    """Model, tokenizer and renderer."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model, renderer = make_model(tokenizer).eval(), make_renderer(tokenizer)
    return SimpleNamespace(model=model, tokenizer=tokenizer, renderer=renderer)


async def test_requests_in_process_share_batches(tiny: Any) -> None:
    """One call of the model for all that wait."""
    widths: list[int] = []
    engine = HuggingFaceEngine(tiny.model)
    sample = engine._sample
    engine._sample = lambda batch: (widths.append(len(batch)), sample(batch))[1]  # type: ignore[method-assign]
    sampling = {"max_tokens": 8, "temperature": 1.0}
    calls = [engine.generate(PROMPT[: 3 + n], sampling, session=str(n)) for n in range(6)]
    await asyncio.gather(*calls)
    assert widths == [6]


async def test_the_models_generation_config_does_not_shape_what_is_drawn(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make every sample the greedy one; the logprobs are those of the temperature asked for."""
    for name, value in {"temperature": 1e-4, "repetition_penalty": 9.0}.items():
        monkeypatch.setattr(tiny.model.generation_config, name, value)
    engine = HuggingFaceEngine(tiny.model)
    for sampling in ({"temperature": 1.0}, {}):
        calls = [engine.generate(PROMPT, {"max_tokens": 20, **sampling}, session="s") for _ in range(4)]
        samples = await asyncio.gather(*calls)
        assert len({tuple(sample.token_ids) for sample in samples}) == 4, sampling
    greedy = await engine.generate(PROMPT, {"max_tokens": 20, "temperature": 0}, session="s")
    logits = tiny.model(torch.tensor([[*PROMPT, *greedy.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == greedy.token_ids


async def test_a_missing_server_is_one_line() -> None:
    engine = VLLMGenerateEngine("http://127.0.0.1:9")
    with pytest.raises(PolicyError, match=r"http://127\.0\.0\.1:9/inference/v1/generate") as caught:
        await engine.generate([1], {}, session="s")
    assert caught.value.retryable
    await engine.close()


@pytest.mark.parametrize("kind", HTTP)
def test_ids_and_logprobs_that_do_not_belong_together_are_refused(kind: Callable[[str], Any]) -> None:
    """One id swapped in otherwise good answers."""
    answers = {
        "VLLMGenerateEngine": {
            "choices": [
                {"token_ids": [4, 5], "logprobs": {"content": _content(4, 6)}, "finish_reason": "stop"}
            ]
        },
        "VLLMCompletionsEngine": {
            "choices": [
                {
                    "token_ids": [4, 5],
                    "logprobs": {"tokens": ["token_id:4", "token_id:6"], "token_logprobs": [-1.0, -1.0]},
                }
            ]
        },
        "SGLangEngine": {
            "output_ids": [4, 5],
            "meta_info": {"output_token_logprobs": [[-1.0, 4, None], [-1.0, 6, None]]},
        },
    }
    engine = kind("http://127.0.0.1:9")
    with pytest.raises(TokenDataError):
        engine.sample(answers[type(engine).__name__])


def _content(*ids: int) -> list[dict[str, Any]]:
    return [{"token": f"token_id:{token}", "logprob": -1.0} for token in ids]


async def test_a_policys_own_pause_lets_running_calls_finish(tiny: Any) -> None:
    started, sampling = asyncio.Event(), asyncio.Event()

    async def sample(prompt_ids: list[int], wanted: dict[str, Any]) -> Sample:
        started.set()
        await sampling.wait()
        return Sample([5], [-1.0], "stop")

    policy = TokenPolicy(CallableEngine(sample), tiny.renderer)
    first = asyncio.create_task(policy.sample(PROMPT, {}, session="s"))
    await started.wait()
    assert policy.pause() == 1
    pausing = asyncio.create_task(asyncio.to_thread(policy.pause, 30.0))
    sampling.set()
    assert await pausing == 0
    assert isinstance(await first, Sample)
    held = asyncio.create_task(policy.sample(PROMPT, {"max_tokens": 2}, session="s"))
    await asyncio.sleep(0)
    assert not held.done()
    policy.resume()
    assert isinstance(await held, Sample)


async def test_requests_that_may_be_of_different_lengths_share_a_batch(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its first turn, each rollout has another room left. A row ends at its own, whatever the others may have."""
    sizes: list[int] = []
    generate = tiny.model.generate
    monkeypatch.setattr(
        tiny.model, "generate", lambda **given: (sizes.append(len(given["input_ids"])), generate(**given))[1]
    )
    engine = HuggingFaceEngine(tiny.model)
    rooms = [3, 9, 5, 1]
    calls = [
        engine.generate(PROMPT[: 4 + n], {"max_tokens": room}, session="s") for n, room in enumerate(rooms)
    ]
    samples = await asyncio.gather(*calls)
    assert sizes == [4]
    assert [len(sample.token_ids) for sample in samples] == rooms
    assert [len(sample.logprobs) for sample in samples] == rooms
    assert {sample.finish_reason for sample in samples} == {"length"}
    one_by_one = [
        await engine.generate(PROMPT, {"max_tokens": 6, "temperature": 0}, session="s") for _ in range(2)
    ]
    pair = [engine.generate(PROMPT, {"max_tokens": room, "temperature": 0}, session="s") for room in (6, 12)]
    together = await asyncio.gather(*pair)
    assert [each.token_ids[:6] for each in together] == [each.token_ids for each in one_by_one]


async def test_a_batch_stays_within_the_models_positions(tiny: Any) -> None:
    """One request with a long prompt, one with a long answer: together they would need 700 of 512 positions."""
    widths: list[int] = []
    engine = HuggingFaceEngine(tiny.model)
    sample = engine._sample
    engine._sample = lambda batch: (widths.append(len(batch)), sample(batch))[1]  # type: ignore[method-assign]
    long, short = PROMPT * 44, PROMPT[:4]
    calls = [(long, 4), (short, 300), (long, 5)]
    await asyncio.gather(*(engine.generate(ids, {"max_tokens": most}, session="s") for ids, most in calls))
    assert widths == [2, 1]


async def test_sampling_ends_when_nobody_waits_for_it(tiny: Any) -> None:
    """Modules are in the mode that they had, also one that the trainer keeps in eval mode while the rest trains."""
    loop, stepped, steps = asyncio.get_running_loop(), asyncio.Event(), []

    def step(*_: Any) -> None:
        steps.append(1)
        loop.call_soon_threadsafe(stepped.set)

    hook = tiny.model.model.embed_tokens.register_forward_hook(step)
    frozen = tiny.model.model.norm
    tiny.model.train()
    frozen.eval()
    try:
        engine = HuggingFaceEngine(tiny.model)
        call = asyncio.create_task(engine.generate(PROMPT, {"max_tokens": 10**6}, session="s"))
        await stepped.wait()
        call.cancel()
        await engine.generate(PROMPT, {"max_tokens": 2}, session="s")
        call = asyncio.create_task(engine.generate(PROMPT, {"max_tokens": 10**6}, session="s"))
        stepped.clear()
        await stepped.wait()
        await engine.stop()
        with pytest.raises(PolicyError, match="stopped"):
            await call
        done = len(steps)
        assert done < 1000
        assert [module for module in tiny.model.modules() if not module.training] == [frozen]
    finally:
        hook.remove()
        tiny.model.eval()


async def test_a_request_with_a_seed_leaves_the_random_numbers_of_others(tiny: Any) -> None:
    """Otherwise a judge with a seed makes the policy's next samples equal, too."""
    engine = HuggingFaceEngine(tiny.model)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    asked = {"max_tokens": 8, "temperature": 1.0, "seed": 3}
    first, second = [await engine.generate(PROMPT, asked, session="s") for _ in range(2)]
    assert first.token_ids == second.token_ids
    assert torch.equal(torch.get_rng_state(), state)


async def test_a_model_that_is_not_there_fails_all_requests_that_wait() -> None:
    def model() -> Any:
        raise PolicyError("no model yet", retryable=False)

    engine = HuggingFaceEngine(model)
    async with asyncio.timeout(30):
        calls = [engine.generate(PROMPT, {"temperature": t}, session="s") for t in (0.5, 1.0)]
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(error) for error in found] == ["no model yet"] * 2
