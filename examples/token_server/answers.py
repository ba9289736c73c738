"""What vLLM's routes answer, from finished generations; a choice's `policy_version` (of the first and the last id) is our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from examples.token_server.sampling import Generation

from gymgate.tokens.messages import chat_tool_calls

Json = dict[str, Any]


def token_name(token: int) -> str:
    """A token in logprobs where ids are asked for."""
    return f"token_id:{token}"


def completion(
    answer_id: str, model: str, generations: Sequence[Generation], body: Mapping[str, Any]
) -> Json:
    """`POST /v1/completions`: one choice for each generation."""
    as_ids = bool(body.get("return_tokens_as_token_ids"))
    choices = []
    for index, generation in enumerate(generations):
        choice: Json = {
            "index": index,
            "text": generation.decode(generation.token_ids),
            "finish_reason": generation.finish_reason,
            "stop_reason": None,
            "logprobs": _completion_logprobs(generation, as_ids),
            "policy_version": generation.versions,
        }
        if body.get("return_token_ids"):
            choice |= {"prompt_token_ids": generation.prompt_ids, "token_ids": generation.token_ids}
        choices.append(choice)
    return {
        "id": answer_id,
        "object": "text_completion",
        "created": 0,
        "model": model,
        "choices": choices,
        "usage": usage(generations),
    }


def generate(answer_id: str, generation: Generation) -> Json:
    """`POST /inference/v1/generate`."""
    choice = {
        "index": 0,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "logprobs": chat_logprobs(generation, as_ids=True),
        "policy_version": generation.versions,
    }
    return {"request_id": answer_id, "choices": [choice], "prompt_logprobs": None}


def sglang(answer_id: str, generation: Generation) -> Json:
    """SGLang's `POST /generate`."""
    details: Json = {
        "id": answer_id,
        "finish_reason": {"type": generation.finish_reason},
        "prompt_tokens": len(generation.prompt_ids),
        "completion_tokens": len(generation.token_ids),
        "policy_version": generation.versions,
    }
    if generation.sampling.logprobs is not None:
        pairs = zip(generation.logprobs, generation.token_ids, strict=True)
        details["output_token_logprobs"] = [[value, token, None] for value, token in pairs]
    return {
        "text": generation.decode(generation.token_ids),
        "output_ids": generation.token_ids,
        "meta_info": details,
    }


def chat(
    answer_id: str,
    model: str,
    generations: Sequence[Generation],
    body: Mapping[str, Any],
    parsed: Sequence[Any],
) -> Json:
    """`POST /v1/chat/completions`; `parsed` holds what the renderer read in each generation's ids."""
    choices = []
    for index, (generation, reading) in enumerate(zip(generations, parsed, strict=True)):
        message = _message(answer_id, index, reading)
        calls = generation.finish_reason == "stop" and "tool_calls" in message
        choice: Json = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else generation.finish_reason,
            "stop_reason": None,
            "logprobs": chat_logprobs(generation, as_ids=bool(body.get("return_tokens_as_token_ids"))),
            "policy_version": generation.versions,
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = generation.token_ids
        choices.append(choice)
    answer: Json = {
        "id": answer_id,
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": choices,
        "usage": usage(generations),
    }
    if body.get("return_token_ids"):
        answer["prompt_token_ids"] = generations[0].prompt_ids
    return answer


def _message(answer_id: str, index: int, reading: Any) -> Json:
    message: Json = {"role": "assistant", "content": reading.content or ""}
    if reading.reasoning_content:
        message["reasoning_content"] = reading.reasoning_content
    whole = ("ok", "invalid_json")  # the latter also for an argument that the tool does not declare
    calls = [call for call in reading.tool_calls or [] if call.name and str(call.status) in whole]
    if calls:
        message["tool_calls"] = chat_tool_calls(calls, f"{answer_id[-8:]}_{index}")
    return message


def usage(generations: Sequence[Generation]) -> Json:
    """Each prompt counted once for each of its samples, as one request each would."""
    prompt = sum(len(generation.prompt_ids) for generation in generations)
    sampled = sum(len(generation.token_ids) for generation in generations)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def chat_logprobs(generation: Generation, *, as_ids: bool) -> Json | None:
    """The chat format; `None` where no logprobs were asked for."""
    if generation.sampling.logprobs is None:
        return None
    name = _namer(generation, as_ids)
    tops: Sequence[Mapping[int, float]] = generation.top_logprobs or [{} for _ in generation.token_ids]
    content = [
        {
            "token": name(token),
            "logprob": logprob,
            "bytes": None,
            "top_logprobs": [
                {"token": name(other), "logprob": value, "bytes": None} for other, value in top.items()
            ],
        }
        for token, logprob, top in zip(generation.token_ids, generation.logprobs, tops, strict=True)
    ]
    return {"content": content}


def _completion_logprobs(generation: Generation, as_ids: bool) -> Json | None:
    if generation.sampling.logprobs is None:
        return None
    name = _namer(generation, as_ids)
    tops: Sequence[Mapping[int, float]] = generation.top_logprobs or [{} for _ in generation.token_ids]
    sampled = list(zip(generation.token_ids, generation.logprobs, tops, strict=True))
    texts = [generation.decode([token]) for token in generation.token_ids]
    return {
        "tokens": [name(token) for token, _, _ in sampled],
        "token_logprobs": [logprob for _, logprob, _ in sampled],
        "top_logprobs": [
            {**{name(other): value for other, value in top.items()}, name(token): logprob}
            for token, logprob, top in sampled
        ],
        "text_offset": [sum(map(len, texts[:position])) for position in range(len(texts))],
    }


def _namer(generation: Generation, as_ids: bool) -> Any:
    return token_name if as_ids else lambda token: generation.decode([token])
