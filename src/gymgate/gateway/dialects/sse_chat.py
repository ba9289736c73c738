"""Chat completion chunks."""

from __future__ import annotations

from collections.abc import Iterator

from gymgate.gateway.dialects._event import event
from gymgate.gateway.dialects._read import Json, without_none

_WHOLE = ("content", "refusal", "tool_calls", "role")


def chat_events(answer: Json, request: Json) -> Iterator[bytes]:
    """Role; reasoning and other fields; content; calls; the finish reason; usage, if asked for; `[DONE]`."""
    head = {name: value for name, value in answer.items() if name not in ("choices", "usage", "object")}
    head["object"] = "chat.completion.chunk"
    with_usage = bool((request.get("stream_options") or {}).get("include_usage"))
    if with_usage:
        head["usage"] = None
    for choice in answer.get("choices") or []:
        for chunk in _chunks(choice):
            yield event({**head, "choices": [chunk]})
    if with_usage:
        yield event({**head, "choices": [], "usage": answer.get("usage")})
    yield b"data: [DONE]\n\n"


def _chunks(choice: Json) -> Iterator[Json]:
    message = choice.get("message") or {}
    index = choice.get("index", 0)
    logprobs = choice.get("logprobs")
    for delta in _deltas(message):
        said = "content" in delta or "refusal" in delta
        yield {"index": index, "delta": delta, "logprobs": logprobs if said else None, "finish_reason": None}
        if said:
            logprobs = None
    kept = {name: value for name, value in choice.items() if name not in ("message", "logprobs", "index")}
    yield {
        **kept,
        "index": index,
        "delta": {},
        "logprobs": logprobs,
        "finish_reason": choice.get("finish_reason"),
    }


def _deltas(message: Json) -> Iterator[Json]:
    yield {"role": message.get("role") or "assistant"}
    if other := without_none({name: value for name, value in message.items() if name not in _WHOLE}):
        yield other
    for name in ("content", "refusal"):
        if message.get(name) is not None:
            yield {name: message[name]}
    for index, call in enumerate(message.get("tool_calls") or []):
        yield {"tool_calls": [{"index": index, **call}]}
