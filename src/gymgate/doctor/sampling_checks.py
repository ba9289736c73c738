"""The policy for the doctor's rollouts, which samples token ids at a server or in this process; and its checks."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gymgate.core import codec
from gymgate.core.addresses import without_login
from gymgate.core.errors import GymgateError, MissingExtraError, PolicyError
from gymgate.core.http_client import HTTPClient, HTTPFailure, Request
from gymgate.core.json_server import object_of
from gymgate.doctor import Finding
from gymgate.doctor.hub import hub_or_cache, no_model
from gymgate.doctor.retokenise import first_difference
from gymgate.doctor.server_checks import ServedModel, server_root
from gymgate.tokens import Engine, Sample, TokenPolicy
from gymgate.tokens.conversation import make_renderer
from gymgate.tokens.engines import HuggingFaceEngine, VLLMCompletionsEngine

SAMPLING: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
"""The trainers' defaults."""
MAX_COMPLETION = 1024
"""Ids of a rollout after its first prompt: enough for several turns, and short."""
TOKENIZE_S = 10.0
_FIRST = [{"role": "user", "content": "Say one word."}]
_NEXT = {"role": "user", "content": "Another."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_GIVE_RENDERER = "give the model's renderer with --renderer"


class RecordingEngine:
    """Keeps the sampling parameters of every call, by session."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sent: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], *, session: str
    ) -> Sample:
        """See `Engine.generate`."""
        self.sent[session].append(dict(sampling))
        return await self.engine.generate(prompt_ids, sampling, session=session)

    async def close(self) -> None:
        """Close the connections of an engine that has any."""
        if isinstance(self.engine, VLLMCompletionsEngine):
            await self.engine.close()


def load_policy(
    model: str, url: str | None, renderer: str | None, served: ServedModel
) -> tuple[Any, TokenPolicy, RecordingEngine]:
    """Return the model's tokenizer, and a policy that samples at `url`, or else with the model loaded here.

    Raises `ConfigError` if the model cannot be loaded, within seconds if the model hub does not answer.
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
        policy = TokenPolicy(
            engine,
            make_renderer(tokenizer, renderer),
            sampling=SAMPLING,
            max_model_len=served.max_model_len,
            max_completion_len=MAX_COMPLETION,
        )
        return tokenizer, policy, engine


def _in_process(model: str, tokenizer: Any) -> Engine:
    try:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(model)
    except ImportError as error:
        raise MissingExtraError(
            f"{_first_line(error)}; pip install torch, or give a server with --vllm URL"
        ) from error
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return HuggingFaceEngine(loaded, pad_token_id=pad)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


async def check_two_turns(policy: TokenPolicy) -> Finding:
    """Check that a second prompt extends the exact ids of the first call."""
    conversation = policy.conversation()
    try:
        answer = await conversation({"messages": list(_FIRST), "max_tokens": 16})
        message = answer["choices"][0]["message"]
        await conversation({"messages": [*_FIRST, message, _NEXT], "max_tokens": 16})
    except GymgateError as error:
        return Finding("two turns", False, str(error))
    if conversation.call_count < 2:
        limit = f"the model's length of {policy.max_model_len} ids leaves no room for two short turns"
        return Finding("two turns", False, f"{limit}; serve it with a larger --max-model-len")
    first, second = conversation.turns
    seen = [*first.prompt_ids, *first.completion_ids]
    if list(second.prompt_ids[: len(seen)]) == seen:
        added = len(second.prompt_ids) - len(seen)
        return Finding(
            "two turns", True, f"the second prompt is the first call's {len(seen)} ids and {added} more"
        )
    at = first_difference(seen, second.prompt_ids)
    miss = f"the second prompt differs from the first call's {len(seen)} ids at position {at}"
    if message.get("reasoning_content"):
        cause = "reasoning is dropped when a user message follows, which costs one more training row"
        fix = "a renderer with thinking_retention='all' keeps it"
        return Finding("two turns", None, f"{miss}: {cause}; {fix}")
    return Finding(
        "two turns", False, f"{miss}: every turn becomes a separate training row; {_GIVE_RENDERER}"
    )


async def check_chat_template(policy: TokenPolicy, url: str, model: str | None) -> Finding:
    """Check that the renderer's ids are those of the server's own chat template, without and with a tool."""
    address = f"{server_root(url)}/tokenize"
    compared = 0
    for tools in (None, [_TOOL]):
        body = {"model": model, "messages": _FIRST, "add_generation_prompt": True} | (
            {"tools": tools} if tools else {}
        )
        try:
            async with HTTPClient() as client:
                answer = await client.send(Request(address), codec.dumps(body), timeout_s=TOKENIZE_S)
            theirs = object_of(answer)["tokens"]
        except (HTTPFailure, TimeoutError, ValueError, KeyError):
            return Finding("chat template", None, f"{without_login(address)} gives no ids to compare with")
        ours = await asyncio.to_thread(policy.render, _FIRST, tools)
        if (at := first_difference(ours, theirs)) is not None:
            return Finding(
                "chat template",
                None,
                f"the renderer's ids {'of a request with a tool ' if tools else ''}differ from the server's chat template "
                f"at {at}: {ours[at : at + 5]} instead of {theirs[at : at + 5]}; {_GIVE_RENDERER}",
            )
        compared += len(ours)
    return Finding(
        "chat template",
        True,
        f"the renderer's {compared} ids of two requests, one with a tool, are those of the server's chat template",
    )


async def check_greedy(policy: TokenPolicy, engine: RecordingEngine) -> Finding:
    """Check that sampling parameters arrive: at temperature 0 an answer repeats."""
    prompt = await asyncio.to_thread(policy.render, _FIRST, None)
    sampling = {**SAMPLING, "temperature": 0.0, "max_tokens": 16}
    try:
        answers = [await engine.engine.generate(prompt, sampling, session="doctor") for _ in range(2)]
    except PolicyError as error:
        return Finding("temperature", False, str(error))
    if answers[0].token_ids == answers[1].token_ids:
        return Finding("temperature", True, "at temperature 0 an answer repeats")
    causes = "sampling parameters do not arrive, or batches are not exact"
    return Finding("temperature", None, f"at temperature 0 two answers differ: {causes}")
