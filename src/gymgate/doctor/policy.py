"""The policy that the doctor rolls out with: a server's or a local model's ids, and what was sent for them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from gymgate.doctor.compare import first_difference
from gymgate.doctor.hub import hub_or_cache, no_model
from gymgate.doctor.servers import Served
from gymgate.errors import GymgateError, MissingExtraError, PolicyError
from gymgate.runtime.checks import Check
from gymgate.tokens import Engine, Sample, TokenPolicy
from gymgate.tokens.conversation import Renderer, make_renderer
from gymgate.tokens.engines import HuggingFaceEngine, VLLMCompletionsEngine

SAMPLING: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
"""What trainers set unless told otherwise."""
MAX_COMPLETION = 1024
"""Ids of a rollout after its first prompt: enough to see several turns, and short."""
_FIRST = [{"role": "user", "content": "Say one word."}]
_NEXT = {"role": "user", "content": "Another."}


class RecordingEngine:
    """Keeps the sampling parameters of every call."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sent: list[dict[str, Any]] = []

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """See `Engine.generate`."""
        self.sent.append(dict(sampling))
        return await self.engine.generate(prompt_ids, sampling, session=session)

    async def close(self) -> None:
        """The connections of an engine that has any."""
        if isinstance(self.engine, VLLMCompletionsEngine):
            await self.engine.close()


def load_policy(
    model: str, url: str | None, renderer: str | None, served: Served
) -> tuple[Any, TokenPolicy, RecordingEngine]:
    """The model's tokenizer, and a policy that samples at `url`, or else with the model loaded here.

    `ConfigError` where there is none; within seconds where the model hub does not answer.
    """
    with hub_or_cache(model) as unanswered:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
            engine = RecordingEngine(
                VLLMCompletionsEngine(url, model=served.model) if url else _in_process(model, tokenizer)
            )
        except (OSError, ValueError) as error:
            raise no_model(model, unanswered or _first_line(error)) from error
        return tokenizer, _policy(engine, make_renderer(tokenizer, renderer), served), engine


def _policy(engine: RecordingEngine, renderer: Renderer, served: Served) -> TokenPolicy:
    return TokenPolicy(
        engine,
        renderer,
        sampling=SAMPLING,
        max_model_len=served.max_model_len,
        max_completion_len=MAX_COMPLETION,
    )


def _in_process(model: str, tokenizer: Any) -> Engine:
    try:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model)
    except ImportError as error:
        raise MissingExtraError(
            f"{_first_line(error)}; pip install torch, or name a server with --vllm URL"
        ) from error
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return HuggingFaceEngine(loaded, pad_token_id=pad)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


async def template_check(policy: TokenPolicy) -> Check:
    """Whether a second prompt extends the exact ids of the first call."""
    conversation = policy.conversation()
    try:
        answer = await conversation({"messages": list(_FIRST), "max_tokens": 16})
        said = answer["choices"][0]["message"]
        await conversation({"messages": [*_FIRST, said, _NEXT], "max_tokens": 16})
    except GymgateError as error:
        return Check("two turns", False, f"{error}")
    first, second = conversation.turns
    seen = [*first.prompt_ids, *first.completion_ids]
    if list(second.prompt_ids[: len(seen)]) == seen:
        added = len(second.prompt_ids) - len(seen)
        return Check(
            "two turns", True, f"the second prompt is the first call's {len(seen)} ids and {added} more"
        )
    at = first_difference(seen, second.prompt_ids)
    told = f"the second prompt leaves the first call's ids at {at} of {len(seen)}"
    if said.get("reasoning_content"):
        fix = "a renderer with thinking_retention='all' keeps it"
        return Check(
            "two turns",
            None,
            f"{told}, where reasoning is dropped when a user speaks: a training row more; {fix}",
        )
    fix = "name the model's renderer with --renderer"
    return Check("two turns", False, f"{told}: every turn becomes a training row of its own; {fix}")


async def chat_template_check(policy: TokenPolicy, url: str, model: str | None) -> Check:
    """Whether the renderer's ids are those of the server's own chat template."""
    body = {"model": model, "messages": _FIRST, "add_generation_prompt": True}
    root = url.rstrip("/").removesuffix("/v1")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session,
            session.post(f"{root}/tokenize", json=body) as answer,
        ):
            theirs = (await answer.json())["tokens"]
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
        return Check("chat template", None, f"{root}/tokenize gives no ids to compare with")
    ours = await asyncio.to_thread(policy.render, _FIRST, None)
    if (at := first_difference(ours, theirs)) is None:
        return Check(
            "chat template", True, f"the renderer's {len(ours)} ids are those of the server's chat template"
        )
    told = f"the renderer's ids differ from the server's chat template at {at}: {ours[at : at + 5]}, there {theirs[at : at + 5]}"
    return Check("chat template", None, f"{told}; name the model's renderer with --renderer")


async def greedy_check(policy: TokenPolicy, engine: RecordingEngine) -> Check:
    """Whether sampling parameters arrive: at temperature 0 an answer repeats."""
    prompt = await asyncio.to_thread(policy.render, _FIRST, None)
    sampling = {**SAMPLING, "temperature": 0.0, "max_tokens": 16}
    try:
        answers = [await engine.engine.generate(prompt, sampling, session="doctor") for _ in range(2)]
    except PolicyError as error:
        return Check("temperature", False, str(error))
    if answers[0].token_ids == answers[1].token_ids:
        return Check("temperature", True, "at temperature 0 an answer repeats")
    return Check(
        "temperature",
        None,
        "at temperature 0 two answers differ: parameters do not arrive, or batches are not exact",
    )
