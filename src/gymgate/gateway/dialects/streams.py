"""A complete answer as the stream of server-sent events that its dialect's clients read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gymgate.core import codec
from gymgate.core.config import Dialect
from gymgate.core.errors import PolicyError
from gymgate.gateway.dialects.answers import MESSAGE_NULLS
from gymgate.gateway.dialects.reading import Json, without, without_none

_Events = Iterator[tuple[str, Json]]
"""Name and fields of each event."""
_WHOLE = ("content", "refusal", "tool_calls", "role")
_GIVEN = {"function_call": "arguments", "custom_tool_call": "input"}
"""The field with what a call of each type gives its tool."""


def encode_stream(answer: Json, dialect: Dialect, request: Json) -> Iterator[bytes]:
    """Yield the events of `answer`; `request` is the body that asked for the stream.

    Every text is one delta. Clients that accumulate the events get `answer` back. Raises `PolicyError`, at any event,
    if the answer is not one of the dialect.
    """
    try:
        if dialect == "chat":
            yield from _chat_events(answer, request)
        else:
            yield from (_responses_events if dialect == "responses" else _messages_events)(answer)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = (
            f"endpoint's answer is no {dialect} answer that can be streamed: {type(error).__name__}: {error}"
        )
        raise PolicyError(message) from error


def error_event(body: Json, dialect: Dialect) -> bytes:
    """Return the event that ends a stream with an error; `body` is the one of an HTTP error answer (`error_body`).

    In a Responses stream the fields of the error stand at the top. They stay under `error` too, where openai's client looks.
    """
    if dialect == "responses":
        error = body["error"]
        flat = {name: error[name] for name in ("code", "message", "param")}
        body = {"type": "error", "sequence_number": 0, **flat, "error": error}
    return _event(body, "error")


def _event(data: Any, name: str | None = None) -> bytes:
    """The bytes of one server-sent event. `name` becomes one line of letters, whatever an endpoint put into it."""
    head = b"event: %s\n" % re.sub(r"[^\w.-]", "_", name, flags=re.ASCII).encode() if name else b""
    return head + b"data: " + codec.dumps(data) + b"\n\n"


def _chat_events(answer: Json, request: Json) -> Iterator[bytes]:
    """Yield chunks for role, reasoning and other fields, content, calls, finish reason, usage (if asked for), `[DONE]`."""
    head = {**without(answer, "choices", "usage"), "object": "chat.completion.chunk"}
    with_usage = bool((request.get("stream_options") or {}).get("include_usage"))
    if with_usage:
        head["usage"] = None
    for choice in answer.get("choices") or []:
        for chunk in _chunks(choice):
            yield _event({**head, "choices": [chunk]})
    if with_usage:
        yield _event({**head, "choices": [], "usage": answer.get("usage")})
    yield b"data: [DONE]\n\n"


def _chunks(choice: Json) -> Iterator[Json]:
    message = choice.get("message") or {}
    index = choice.get("index", 0)
    logprobs = choice.get("logprobs")
    for delta in _deltas(message):
        has_text = "content" in delta or "refusal" in delta
        own_logprobs = logprobs if has_text else None
        yield {"index": index, "delta": delta, "logprobs": own_logprobs, "finish_reason": None}
        if has_text:
            logprobs = None  # clients add up those of all chunks
    end = {"index": index, "delta": {}, "logprobs": logprobs, "finish_reason": choice.get("finish_reason")}
    yield {**without(choice, "message"), **end}


def _deltas(message: Json) -> Iterator[Json]:
    yield {"role": message.get("role") or "assistant"}
    if other := without_none(without(message, *_WHOLE)):
        yield other
    for name in ("content", "refusal"):
        if message.get(name) is not None:
            yield {name: message[name]}
    for index, call in enumerate(message.get("tool_calls") or []):
        yield {"tool_calls": [{**call, "index": index}]}  # some endpoints give each -1


def _responses_events(answer: Json) -> Iterator[bytes]:
    """Yield `created`, `in_progress`, the events of each item, and `completed`, `incomplete` or `failed`; numbered."""
    for number, (kind, fields) in enumerate(_events(answer)):
        yield _event({"type": kind, "sequence_number": number, **fields}, kind)


def _events(answer: Json) -> _Events:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    begun |= {"completed_at": None} if "completed_at" in answer else {}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(answer.get("output") or []):
        yield "response.output_item.added", {"output_index": index, "item": _item_start(item)}
        yield from _inside(item, {"item_id": item.get("id"), "output_index": index})
        yield "response.output_item.done", {"output_index": index, "item": item}
    status = answer.get("status")
    end = status if status in ("incomplete", "failed") else "completed"
    yield f"response.{end}", {"response": answer}


def _item_start(item: Json) -> Json:
    """An item as it starts, without content. Items of other types start whole."""
    kind = item.get("type")
    if kind == "message":
        return {**item, "status": "in_progress", "content": []}
    if kind == "function_call":
        return {**item, "status": "in_progress", "arguments": ""}
    if kind == "custom_tool_call":
        return {**item, "input": ""}
    if kind == "reasoning":
        return {**item, "summary": [], **({"content": []} if item.get("content") else {})}
    return item


def _inside(item: Json, where: Json) -> _Events:
    kind = item.get("type")
    if kind in ("message", "reasoning"):
        yield from _summaries(item.get("summary") or [], where)
        for index, part in enumerate(item.get("content") or []):
            yield from _content_part(part, {**where, "content_index": index})
    elif kind in _GIVEN:
        field = _GIVEN[kind]
        text, name = item.get(field) or "", {"name": item.get("name")} if kind == "function_call" else {}
        yield f"response.{kind}_{field}.delta", {**where, "delta": text}
        yield f"response.{kind}_{field}.done", {**where, **name, field: text}


def _summaries(summary: list[Json], where: Json) -> _Events:
    for index, part in enumerate(summary):
        here = {**where, "summary_index": index}
        text = part.get("text") or ""
        yield "response.reasoning_summary_part.added", {**here, "part": {**part, "text": ""}}
        yield "response.reasoning_summary_text.delta", {**here, "delta": text}
        yield "response.reasoning_summary_text.done", {**here, "text": text}
        yield "response.reasoning_summary_part.done", {**here, "part": part}


def _content_part(part: Json, where: Json) -> _Events:
    kind = part.get("type")
    name, field = ("refusal", "refusal") if kind == "refusal" else (str(kind), "text")
    text: Any = part.get(field) or ""
    extra = {"logprobs": part.get("logprobs") or []} if kind == "output_text" else {}
    start = {**part, field: "", **({"logprobs": []} if "logprobs" in part else {})}
    yield "response.content_part.added", {**where, "part": start}
    yield f"response.{name}.delta", {**where, "delta": text, **extra}
    yield f"response.{name}.done", {**where, field: text, **extra}
    yield "response.content_part.done", {**where, "part": part}


def _messages_events(answer: Json) -> Iterator[bytes]:
    """Yield `message_start`, each block's start, deltas and stop, `message_delta`, `message_stop`."""
    usage = answer.get("usage") or {}
    start = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
    start["usage"] = {**usage, "output_tokens": 0}
    yield _named_event({"type": "message_start", "message": start})
    for index, block in enumerate(answer.get("content") or []):
        shell, deltas = _block_start(block)
        yield _named_event({"type": "content_block_start", "index": index, "content_block": shell})
        for delta in deltas:
            yield _named_event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _named_event({"type": "content_block_stop", "index": index})
    stop = {name: answer.get(name) for name in ("stop_reason", "stop_sequence", *MESSAGE_NULLS)}
    yield _named_event({"type": "message_delta", "delta": stop, "usage": usage})
    yield _named_event({"type": "message_stop"})


def _named_event(data: Json) -> bytes:
    return _event(data, data["type"])


def _block_start(block: Json) -> tuple[Json, list[Json]]:
    """A block as it starts, and the deltas that make it whole; blocks of other types start whole."""
    kind = block.get("type")
    if kind == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block.get("text") or ""}]
    if kind == "thinking":
        deltas: list[Json] = [{"type": "thinking_delta", "thinking": block.get("thinking") or ""}]
        if block.get("signature"):
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {**block, "thinking": "", "signature": ""}, deltas
    if kind == "tool_use":
        text = codec.dumps(block.get("input") or {}).decode()
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    return block, []
