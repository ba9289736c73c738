"""What was said in a rollout, as far as its result tells: messages, reasoning, tool calls and their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson


class Said(NamedTuple):
    """One entry of a conversation."""

    who: str
    """system, user, assistant, reasoning, call NAME, output."""
    text: str


def transcript(rollout: Mapping[str, Any]) -> list[Said]:
    """The input and then the output of the agent's last response; nothing of what is not there."""
    result = rollout.get("result") or {}
    asked = (result.get("responses_create_params") or {}).get("input")
    answered = (result.get("response") or {}).get("output")
    entries = [Said("user", asked)] if isinstance(asked, str) else list(_items(asked))
    return [*entries, *_items(answered)]


def _items(items: Any) -> Iterator[Said]:
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, Mapping):
            continue
        kind = item.get("type") or "message"
        if kind == "message":
            yield Said(str(item.get("role") or "assistant"), _text(item.get("content")))
        elif kind == "reasoning":
            yield Said("reasoning", _text(item.get("content")) or _text(item.get("summary")))
        elif kind.endswith("_output"):
            yield Said("output", _text(item.get("output")))
        elif kind.endswith("_call"):
            yield Said(f"call {item.get('name') or kind}", _text(item.get("arguments") or item.get("action")))
        else:
            yield Said(str(kind), _text({key: value for key, value in item.items() if key != "type"}))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(_text, value)))
    if isinstance(value, Mapping):
        for name in ("text", "refusal", "output"):
            if isinstance(value.get(name), str):
                return str(value[name])
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
