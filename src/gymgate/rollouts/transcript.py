"""The conversation of a rollout, as far as its result holds it: messages, reasoning, tool calls and their outputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gymgate.core import codec

_MARKUP = re.compile(r"</?[A-Za-z][\w-]*(?:\s[^<>]*)?/?>|\*{2,}|`+|^#+\s|\|[\s:|-]+\|", re.MULTILINE)
"""Tags, and Markdown's signs of bold text, code, headings and tables."""


class Entry(NamedTuple):
    """One entry of a conversation."""

    role: str
    """system, developer, user, assistant, reasoning, call NAME, output."""
    text: str


def transcript(result: Any) -> list[Entry]:
    """The input and the output of the agent's last response, from a rollout's result."""
    asked, answered = items_of(result)
    return [*entries_of(asked), *entries_of(answered)]


def items_of(result: Any) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the items of a result's input and of the agent's last response, without those of another form.

    An agent may answer with the whole conversation after each step (aviary): the last one holds all.
    """
    value = _within(result, "responses_create_params", "input")
    asked = _items([{"role": "user", "content": value}] if isinstance(value, str) else value)
    answered = _within(result, "response", "output")
    if not (isinstance(answered, list) and answered and isinstance(answered[-1], list)):
        return asked, _items(answered)
    whole = _items(answered[-1])
    return asked, whole[len(asked) if whole[: len(asked)] == asked else 0 :]


def opening(result: Any, longest: int = 60) -> str:
    """Return the first words that the user says, on one line and without markup; empty if the result holds no conversation."""
    text = next((entry.text for entry in transcript(result) if entry.role == "user"), "")
    line = " ".join(_MARKUP.sub(" ", text[: 4 * longest]).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def cut(text: str, longest: int) -> str:
    """Return the text, or its beginning and how much is left out."""
    rest = len(text) - longest
    return text if rest <= 0 else f"{text[:longest]}\n... and {rest} more characters"


def _within(value: Any, *names: str) -> Any:
    """Return what is there under these names, one within the other; `None` if nothing is: an agent may answer anything."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def entries_of(items: Iterable[Mapping[str, Any]]) -> Iterator[Entry]:
    """Yield the entries of items."""
    for item in items:
        kind = str(item.get("type") or "message")
        if kind == "message":
            yield Entry(str(item.get("role") or "assistant"), text_of(item.get("content")))
        elif kind == "reasoning":
            yield Entry("reasoning", text_of(item.get("content")) or text_of(item.get("summary")))
        elif kind.endswith("_output"):
            yield Entry("output", text_of(item.get("output")))
        elif kind.endswith("_call"):
            given = item.get("arguments") or item.get("action") or item.get("input")
            yield Entry(f"call {item.get('name') or kind}", text_of(given))
        else:
            yield Entry(kind, text_of({key: value for key, value in item.items() if key != "type"}))


def text_of(value: Any) -> str:
    """Return the text of a content, whatever its form."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(text_of, value)))
    if isinstance(value, Mapping):
        for name in ("text", "refusal", "output"):
            if isinstance(value.get(name), str):
                return str(value[name])
    return codec.dumps(value, indent=True).decode()
