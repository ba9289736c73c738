"""Fingerprints of what a model wrote, in each dialect; see `memory` for what they leave out and why."""

from __future__ import annotations

from typing import Any

from gymgate.config import Dialect
from gymgate.gateway.dialects._read import Json, canonical_json, joined_text
from gymgate.gateway.dialects.memory import Mark
from gymgate.gateway.dialects.reasoning import item_reasoning, message_reasoning


def marks_of_answer(answer: Json, dialect: Dialect) -> list[Mark]:
    """Of an answer as an agent gets it, in the order in which it will send it back."""
    if dialect == "responses":
        return [item_mark(item) for item in answer["output"]]
    if dialect == "chat":
        return [message_mark(answer["choices"][0]["message"])]
    return [block_mark(block) for block in answer["content"]]


def item_mark(item: Json) -> Mark:
    """Of an assistant's Responses item."""
    kind = str(item.get("type") or "message")
    item_id = item.get("id")
    return Mark((kind, *_item_facts(kind, item)), item_id if isinstance(item_id, str) else None)


def _item_facts(kind: str, item: Json) -> tuple[str, ...]:
    if kind == "message":
        return _content_facts(item.get("content"))
    if kind == "reasoning":
        return (item_reasoning(item),)
    if kind == "function_call":
        return (*_call_facts(item), canonical_json(item.get("arguments")))
    if kind == "custom_tool_call":
        return (*_call_facts(item), str(item.get("input")))
    return (canonical_json({name: value for name, value in item.items() if value is not None}),)


def _call_facts(item: Json) -> tuple[str, str]:
    return str(item.get("call_id")), str(item.get("name"))


def _content_facts(content: Any) -> tuple[str, ...]:
    """Text and refusals; "" and no content at all are the same, and neither is how text is cut into parts."""
    if content is None or isinstance(content, str):
        return (content or "", "")
    refusals = (part.get("refusal") for part in content if isinstance(part, dict))
    return (joined_text(content), "".join(refusal for refusal in refusals if isinstance(refusal, str)))


def message_mark(message: Json) -> Mark:
    """Of an assistant's chat message."""
    text, refusal = _content_facts(message.get("content"))
    calls = [fact for call in message.get("tool_calls") or [] for fact in _tool_call_facts(call)]
    refusal = refusal or str(message.get("refusal") or "")
    return Mark(("assistant", text, refusal, message_reasoning(message)[0], *calls))


def _tool_call_facts(call: Json) -> tuple[str, ...]:
    custom, function = call.get("custom"), call.get("function")
    if isinstance(custom, dict):
        return ("custom", str(call.get("id")), str(custom.get("name")), str(custom.get("input")))
    function = function if isinstance(function, dict) else {}
    name, arguments = str(function.get("name")), canonical_json(function.get("arguments"))
    return ("function", str(call.get("id")), name, arguments)


def block_mark(block: Json) -> Mark:
    """Of a content block of an assistant's Anthropic message."""
    kind = str(block.get("type"))
    if kind == "text":
        return Mark((kind, str(block.get("text") or "")))
    if kind == "thinking":
        return Mark((kind, str(block.get("thinking") or "")))
    if kind == "tool_use":
        return Mark((kind, str(block.get("id")), str(block.get("name")), canonical_json(block.get("input"))))
    return Mark(
        (kind, canonical_json({name: value for name, value in block.items() if name != "cache_control"}))
    )
