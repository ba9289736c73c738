"""A model's reasoning: under several names in chat messages, as items of their own in Responses."""

from __future__ import annotations

import re

from gymgate.gateway.dialects._read import Json, joined_text
from gymgate.gateway.dialects.memory import THINK_TAGS, ReasoningStyle

_THINK = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_FIELDS = ("reasoning_content", "reasoning")


def message_reasoning(message: Json) -> tuple[str, ReasoningStyle | None]:
    """Reasoning of a chat message from a field of its own, and which fields carried it.

    `reasoning_content`: vLLM before 0.16, SGLang, DeepSeek, Qwen; `reasoning`: vLLM, OpenRouter;
    `reasoning_details`: OpenRouter's and MiniMax's list.
    """
    fields = tuple(name for name in _FIELDS if isinstance(message.get(name), str) and message[name])
    if fields:
        return message[fields[0]], fields
    details = message.get("reasoning_details")
    if isinstance(details, list):
        texts = [d.get("text") or d.get("summary") for d in details if isinstance(d, dict)]
        if text := joined_text(texts, "\n"):
            return text, None
    return "", None


def split_think_tags(content: str) -> tuple[list[str], str]:
    """The texts inside complete `<think>` tags, and the content without them, as NeMo Gym's model server does."""
    if "<think>" not in content:
        return [], content
    return _THINK.findall(content), _THINK.sub("", content)


def set_reasoning(message: Json, reasoning: str, style: ReasoningStyle) -> None:
    """Put reasoning into an assistant's chat message, in the style of its endpoint."""
    if style == THINK_TAGS:
        message["content"] = f"<think>{reasoning}</think>{message.get('content') or ''}"
        return
    for name in style:
        message[name] = reasoning


def item_reasoning(item: Json) -> str:
    """Text of a Responses reasoning item: the reasoning itself if it is there, else its summary."""
    content = joined_text(item.get("content") or [], "\n\n")
    return content or joined_text(item.get("summary") or [], "\n\n")
