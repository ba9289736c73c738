"""A chat completion as an Anthropic message."""

from __future__ import annotations

import orjson

from gymgate.gateway.dialects._read import Json, as_text, new_id
from gymgate.gateway.dialects.chat_answer import Reply, call_of, read_reply
from gymgate.gateway.dialects.usage import chat_usage_to_anthropic

_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal", "tool_calls": "tool_use"}


def chat_answer_to_messages(answer: Json, request: Json) -> Json:
    """The Anthropic message for a checked chat answer to `request` (the agent's messages request)."""
    reply = read_reply(answer)
    stopped_by = answer["choices"][0].get("stop_reason")  # vLLM: the stop string, or a token id
    sequence = stopped_by if stopped_by in (request.get("stop_sequences") or ()) else None
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": answer.get("model") or request.get("model") or "",
        "content": _blocks(reply),
        "stop_reason": "stop_sequence" if sequence else _stop_reason(reply),
        "stop_sequence": sequence,
        "usage": chat_usage_to_anthropic(answer.get("usage")),
    }


def _stop_reason(reply: Reply) -> str:
    if reply.tool_calls and reply.finish_reason in ("stop", "tool_calls", "function_call"):
        return "tool_use"
    return "refusal" if reply.refusal else _STOP_REASONS.get(reply.finish_reason, "end_turn")


def _blocks(reply: Reply) -> list[Json]:
    """Thinking, text, calls; an empty answer is one empty text."""
    blocks: list[Json] = [{"type": "thinking", "thinking": text, "signature": ""} for text in reply.reasoning]
    if (text := reply.text + reply.refusal) or not reply.tool_calls:
        blocks.append({"type": "text", "text": text})
    return [*blocks, *map(_tool_use, reply.tool_calls)]


def _tool_use(call: Json) -> Json:
    name, arguments = call_of(call)
    return {"type": "tool_use", "id": call["id"], "name": name, "input": _input(arguments)}


def _input(arguments: str) -> Json:
    """Anthropic has objects only: what a model wrote instead stands under `arguments`, for the tool to refuse."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": as_text(value)}
