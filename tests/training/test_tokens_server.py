"""The token server against the model itself, and against the clients it stands in for vLLM with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

torch = pytest.importorskip("torch", reason="training tests need torch: see docs/training.md")
pytest.importorskip("trl", reason="training tests need trl: see docs/training.md")

from examples.token_server.__main__ import load  # noqa: E402
from examples.token_server.weights import FileWeightTransfer  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # the first test waits for the server to import torch

PROMPT = [1, 29, 27, 13, 26, 36, 16, 17, 2]
LONG = {"max_tokens": 3000, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def model(token_server_url: str) -> Any:
    """The server's, whatever weights it was given before."""
    made = load("tiny", 0)[0].eval()
    FileWeightTransfer(token_server_url).send_weights(made.named_parameters())
    return made


@pytest.fixture
async def client(token_server_url: str) -> Iterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(token_server_url) as session:
        yield session


async def post(client: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with client.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


async def generate(client: aiohttp.ClientSession, prompt: list[int], **sampling: Any) -> dict[str, Any]:
    body = {"token_ids": prompt, "sampling_params": {"logprobs": 1, **sampling}}
    return (await post(client, "/inference/v1/generate", body))["choices"][0]


async def until(client: aiohttp.ClientSession, **wanted: Any) -> dict[str, Any]:
    """The server's counters once they are as wanted."""
    while True:
        async with client.get("/load") as response:
            state = await response.json()
        if all(check(state[name]) for name, check in wanted.items()):
            return state


def recomputed(model: Any, prompt: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits.float() / temperature, -1)
    return chosen.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


async def test_logprobs_are_the_models(client: aiohttp.ClientSession, model: Any) -> None:
    choice = await generate(client, PROMPT, max_tokens=40, ignore_eos=True, temperature=0.7)
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert len(choice["token_ids"]) == 40
    assert logprobs == pytest.approx(recomputed(model, PROMPT, choice["token_ids"], 0.7), abs=1e-4)


async def test_rows_that_join_and_leave_a_batch_do_not_disturb_each_other(
    client: aiohttp.ClientSession, model: Any
) -> None:
    prompts = [PROMPT[: 3 + number % 6] * (1 + number % 3) for number in range(12)]
    jobs = [
        generate(client, prompt, max_tokens=5 + 7 * number, temperature=0, ignore_eos=True)
        for number, prompt in enumerate(prompts)
    ]
    choices = await asyncio.gather(*jobs)
    for prompt, choice in zip(prompts, choices, strict=True):
        logits = model(torch.tensor([[*prompt, *choice["token_ids"]]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == choice["token_ids"]
    assert (await until(client))["largest_batch"] > 1


async def test_a_disconnected_request_is_aborted(client: aiohttp.ClientSession) -> None:
    before = await until(client)
    call = asyncio.create_task(generate(client, PROMPT, **LONG))
    await until(client, running=lambda count: count == 1)
    call.cancel()
    after = await until(client, running=lambda count: count == 0)
    assert after["aborted"] == before["aborted"] + 1


async def test_a_kept_request_goes_on_under_new_weights(
    client: aiohttp.ClientSession, token_server_url: str, model: Any
) -> None:
    """Its ids before the update are the old weights', those after it the new ones'; it says so."""
    transfer = FileWeightTransfer(token_server_url, mode="keep")
    call = asyncio.create_task(generate(client, PROMPT, max_tokens=400, ignore_eos=True))
    state = await until(client, running=lambda count: count == 1)
    await asyncio.to_thread(transfer.pause)
    held = asyncio.create_task(generate(client, PROMPT, max_tokens=3))
    other = load("tiny", 7)[0].eval()
    await asyncio.to_thread(transfer.send_weights, other.named_parameters())
    paused = await until(client, waiting=lambda count: count == 1)
    assert paused["steps"] == (await until(client))["steps"]
    await asyncio.to_thread(transfer.resume)
    choice, after = await call, await held
    await asyncio.to_thread(transfer.send_weights, model.named_parameters())
    assert choice["policy_version"] == [state["version"], state["version"] + 1]
    assert after["policy_version"] == [state["version"] + 1] * 2
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    old, new = (recomputed(which, PROMPT, choice["token_ids"]) for which in (model, other))
    assert logprobs[0] == pytest.approx(old[0], abs=1e-4)
    assert logprobs[-1] == pytest.approx(new[-1], abs=1e-4)
    assert logprobs[-1] != pytest.approx(old[-1], abs=1e-4)


async def test_a_pause_can_abort_or_wait(client: aiohttp.ClientSession) -> None:
    call = asyncio.create_task(generate(client, PROMPT, **LONG))
    await until(client, running=lambda count: count == 1)
    await post(client, "/pause?mode=abort", {})
    assert (await call)["finish_reason"] == "abort"
    await post(client, "/resume", {})
    call = asyncio.create_task(generate(client, PROMPT, max_tokens=400, ignore_eos=True))
    await until(client, running=lambda count: count == 1)
    await post(client, "/pause?mode=wait", {})
    state = await until(client)
    await post(client, "/resume", {})
    assert state["running"] == 0
    assert len((await call)["token_ids"]) == 400


async def test_errors_are_openais(client: aiohttp.ClientSession) -> None:
    for path, body, status in (
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 10**6}, 400),
        ("/v1/completions", {"prompt": PROMPT, "model": "other"}, 404),
        ("/v1/completions", {"prompt": PROMPT, "logit_bias": {"1": 2}}, 400),
        ("/inference/v1/generate", {"token_ids": []}, 400),
    ):
        async with client.post(path, json=body) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == status


async def test_trls_clients_understand_it(token_server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP side of both; they refuse to be made without vLLM, which they need for NCCL only."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr("trl.generation.vllm_client.is_vllm_available", lambda: True)
    from accelerate import PartialState
    from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncGRPOClient
    from trl.generation.vllm_client import VLLMClient

    def synchronously() -> None:
        PartialState()  # TRL's loggers need it
        client = VLLMClient(base_url=token_server_url)
        made = client.generate(
            [PROMPT, PROMPT[:4]], n=2, max_tokens=6, generation_kwargs={"ignore_eos": True}
        )
        assert made["prompt_ids"] == [PROMPT, PROMPT[:4]]
        assert [len(ids) for ids in made["completion_ids"]] == [6] * 4
        assert [[ids[0] for ids in row] for row in made["logprob_token_ids"]] == made["completion_ids"]
        answer = client.chat([[{"role": "user", "content": "hello"}]], max_tokens=6)
        assert len(answer["completion_ids"][0]) == len(answer["logprobs"][0])
        other = AsyncGRPOClient(token_server_url)
        other.wait_for_server_ready()
        assert other.get_max_model_len() == 4096
        assert other.get_dtype() == "torch.float32"
        other.pause()
        other.resume()

    await asyncio.to_thread(synchronously)


async def test_the_renderers_client_understands_it(token_server_url: str) -> None:
    """What verifiers' training client calls."""
    from openai import AsyncOpenAI
    from renderers.client import generate as rendered_generate

    renderer = load("tiny", 0)[2]
    async with AsyncOpenAI(base_url=f"{token_server_url}/v1", api_key="none") as client:
        made = await rendered_generate(
            client=client,
            renderer=renderer,
            messages=[{"role": "user", "content": "hello"}],
            model="tiny",
            sampling_params={"max_tokens": 12},
        )
    assert len(made["completion_ids"]) == len(made["completion_logprobs"]) <= 12


async def test_verifiers_training_client_understands_it(
    token_server_url: str, tiny_tokenizer_directory: Path
) -> None:
    from renderers.configs import Qwen3RendererConfig
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    config = TrainClientConfig(
        base_url=f"{token_server_url}/v1",
        renderer=Qwen3RendererConfig(),
        renderer_model_name=str(tiny_tokenizer_directory),
    )
    client = TrainClient(config)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    response = await client.get_response(ChatDialect(), body, SamplingConfig(max_tokens=12, temperature=1.0))
    await client.close()
    assert response.tokens is not None
    assert 0 < len(response.tokens.completion_ids) == len(response.tokens.completion_logprobs) <= 12


async def test_text_and_ids_convert(client: aiohttp.ClientSession) -> None:
    tokens = (await post(client, "/tokenize", {"prompt": "<|im_start|>hello"}))["tokens"]
    assert tokens[0] == 1
    assert "hello" in (await post(client, "/detokenize", {"tokens": tokens}))["prompt"]
    assert json.dumps(tokens)
