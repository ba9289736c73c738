"""Every engine over the same real model: what they return is what the model would say of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

torch = pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")

from examples.token_server.__main__ import load  # noqa: E402
from examples.token_server.weights import FileWeightTransfer  # noqa: E402

from gymgate.errors import PolicyError, TokenDataError  # noqa: E402
from gymgate.tokens import TokenPolicy  # noqa: E402
from gymgate.tokens.engines import (  # noqa: E402
    CallableEngine,
    Engine,
    HuggingFaceEngine,
    Sample,
    ServerManagerEngine,
    SGLangEngine,
    VLLMCompletionsEngine,
    VLLMGenerateEngine,
)

pytestmark = pytest.mark.timeout(300)  # the first test waits for the server to import torch

PROMPT = [1, 29, 27, 13, 26, 36, 16, 17, 2]
STOP = [0, 2]
HTTP = (VLLMGenerateEngine, VLLMCompletionsEngine, SGLangEngine)


@pytest.fixture(scope="module")
def tiny(token_server_url: str) -> Any:
    """Model, tokenizer and renderer: the token server's own, whatever weights it was given before."""
    model, tokenizer, renderer = load("tiny", 0)
    FileWeightTransfer(token_server_url).send_weights(model.named_parameters())
    return SimpleNamespace(model=model.eval(), tokenizer=tokenizer, renderer=renderer)


class ServerManager:
    """verl's server manager before an engine: what the token server samples, as verl's `TokenOutput`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        sampling_params.pop("logprobs")
        sample = await self.engine.generate(prompt_ids, sampling_params, session=request_id)
        return SimpleNamespace(
            token_ids=sample.token_ids,
            log_probs=sample.logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": 3},
        )


@pytest.fixture
async def engines(token_server_url: str, tiny: Any) -> AsyncIterator[dict[str, Engine]]:
    remote = {kind.__name__: kind(token_server_url) for kind in HTTP}
    first = remote["VLLMGenerateEngine"]
    yield {
        **remote,
        "ServerManagerEngine": ServerManagerEngine(ServerManager(first)),
        "HuggingFaceEngine": HuggingFaceEngine(tiny.model, version=lambda: 3),
        "CallableEngine": CallableEngine(
            lambda ids, sampling: first.generate(ids, sampling, session="callable")
        ),
    }
    for engine in remote.values():
        await engine.close()


def recomputed(model: Any, prompt: list[int], sampled: list[int], temperature: float) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits.float() / temperature, -1)
    return chosen.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


async def test_logprobs_are_the_models_for_every_engine(engines: dict[str, Engine], tiny: Any) -> None:
    for name, engine in engines.items():
        sampling = {"max_tokens": 30, "temperature": 0.8, "top_p": 1.0, "top_k": -1, "stop_token_ids": STOP}
        samples = await asyncio.gather(*(engine.generate(PROMPT, sampling, session="s") for _ in range(4)))
        for sample in samples:
            expected = recomputed(tiny.model, PROMPT, sample.token_ids, 0.8)
            assert sample.logprobs == pytest.approx(expected, abs=1e-4), name
            assert (sample.finish_reason == "stop") == (sample.token_ids[-1] in STOP), name
            assert len(sample.token_ids) == 30 or sample.finish_reason == "stop", name
            assert sample.policy_version is not None, name


async def test_greedy_engines_agree(engines: dict[str, Engine]) -> None:
    sampling = {"max_tokens": 25, "temperature": 0, "stop_token_ids": STOP}
    made = {name: await engine.generate(PROMPT, sampling, session="s") for name, engine in engines.items()}
    assert len({tuple(sample.token_ids) for sample in made.values()}) == 1
    assert len({sample.finish_reason for sample in made.values()}) == 1


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
    with pytest.raises(PolicyError, match=r"cannot reach http://127.0.0.1:9/inference/v1/generate") as caught:
        await engine.generate([1], {}, session="s")
    assert caught.value.retryable
    await engine.close()


async def test_a_refusal_carries_its_status(engines: dict[str, Engine]) -> None:
    for kind in HTTP:
        with pytest.raises(PolicyError, match=r"answered 400.*maximum context length") as caught:
            await engines[kind.__name__].generate([5] * 5000, {"max_tokens": 4}, session="s")
        assert caught.value.status_code == 400


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


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_call_survives_a_weight_update(
    token_server_url: str, tiny: Any, mode: str, engines: dict[str, Engine]
) -> None:
    """Whatever the server does with running requests, the call ends with all its ids, and says which weights made them."""
    policy = TokenPolicy(engines["VLLMGenerateEngine"], tiny.renderer)
    transfer = FileWeightTransfer(token_server_url, mode=mode)
    sampling = {"max_tokens": 300, "ignore_eos": True}
    call = asyncio.create_task(policy.sample(PROMPT, sampling, session="s"))
    version = await _running(token_server_url)
    await asyncio.to_thread(transfer.pause)
    await asyncio.to_thread(transfer.send_weights, tiny.model.named_parameters())
    await asyncio.to_thread(transfer.resume)
    sample = await call
    assert len(sample.token_ids) == len(sample.logprobs or []) == 300
    assert sample.logprobs == pytest.approx(recomputed(tiny.model, PROMPT, sample.token_ids, 1.0), abs=1e-4)
    assert sample.policy_version == (version, version if mode == "wait" else version + 1)


async def test_a_policys_own_pause_lets_running_calls_finish(
    tiny: Any, engines: dict[str, Engine], token_server_url: str
) -> None:
    policy = TokenPolicy(engines["VLLMGenerateEngine"], tiny.renderer)
    first = asyncio.create_task(policy.sample(PROMPT, {"max_tokens": 200, "ignore_eos": True}, session="s"))
    await _running(token_server_url)
    assert await asyncio.to_thread(policy.pause, 30.0) == 0
    assert isinstance(await first, Sample)
    held = asyncio.create_task(policy.sample(PROMPT, {"max_tokens": 2}, session="s"))
    await asyncio.sleep(0)
    assert not held.done()
    policy.resume()
    assert isinstance(await held, Sample)


async def _running(url: str) -> int:
    """The server's version once it samples."""
    async with aiohttp.ClientSession(url) as session:
        while True:
            async with session.get("/load") as response:
                state = await response.json()
            if state["running"]:
                return int(state["version"])
