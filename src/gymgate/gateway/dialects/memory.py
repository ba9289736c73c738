"""Remembers translated answers, so that they come back to their endpoint exactly as it gave them.

An agent sends its history with every call. For each answer, the memory keeps the endpoint's own form of it (one
chat message, or a list of Responses items) under the fingerprints of the items or blocks that the agent got. When a
run of those comes back, the endpoint gets its own form again, byte for byte, so that its prompt extends the
previous one. Fingerprints cover what the model wrote (text, reasoning, calls with ids) and nothing that an
agent's own validation may add, drop or reformat (item ids, statuses, nulls, white space in JSON arguments).
A run that was edited, or lost its reasoning, matches nothing and is translated from what was sent. Of answers that an agent
cannot tell apart (what the endpoint encrypted differs), the one that was given to the same item comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gymgate.core.config import Dialect
from gymgate.gateway.dialects.content import (
    BOTH_FIELDS,
    ReasoningStyle,
    item_reasoning,
    message_reasoning,
    text_and_refusal,
)
from gymgate.gateway.dialects.reading import Json, canonical_json, without, without_none

Content = tuple[str, ...]
"""The parts of an item or block that an agent sends back unchanged."""


class Fingerprint(NamedTuple):
    """The identity of an item or block."""

    content: Content
    id: str | None = None
    """Item id; where the agent kept it, it tells apart two answers with the same content."""


class Original(dict[str, object]):
    """A message or item as the endpoint gave it; translations do not change it."""


class Run(NamedTuple):
    """One answer: the contents that the agent got, and the endpoint's own form of it."""

    contents: tuple[Content, ...]
    originals: tuple[Original, ...]


_Runs = dict[tuple[Content, ...], dict[int, Run]]
"""By contents and by what they were given to (`heard_before`), the latest last."""


class ConversationMemory:
    """The answers of one rollout. It is not thread-safe; a call takes time in proportion to the history it looks up."""

    def __init__(self) -> None:
        self._by_start: dict[tuple[Dialect, Dialect, Content], dict[int, dict[Content, _Runs]]] = {}
        """By first content, length and last content, so that a look-up costs a hash per length that occurs, and contents are
        compared only where both ends are the same: a model may think one thought ten thousand times."""
        self._by_id: dict[tuple[Dialect, Dialect, str], Run] = {}
        self._items: dict[str, Json] = {}
        self._style: ReasoningStyle | None = None

    @property
    def reasoning_style(self) -> ReasoningStyle:
        """The fields in which this endpoint's chat messages carry reasoning; both known ones until it has used one."""
        if self._style is None:
            self._style = BOTH_FIELDS  # from now on, so that the same history is always the same request
        return self._style

    def learn_reasoning_style(self, style: ReasoningStyle) -> None:
        """Keep the first style seen, or assumed."""
        if self._style is None:
            self._style = style

    def keep_items(self, items: Sequence[Json]) -> None:
        """Keep the Responses items that the agent got, which it may refer to by id."""
        self._items.update((item["id"], item) for item in items if isinstance(item.get("id"), str))

    def item(self, item_id: object) -> Json | None:
        """Return the item that the agent got with this id."""
        return self._items.get(item_id) if isinstance(item_id, str) else None

    def record(
        self,
        agent: Dialect,
        endpoint: Dialect,
        fingerprints: Sequence[Fingerprint],
        originals: Sequence[Json],
        heard: int,
    ) -> None:
        """Remember the `originals` of an answer to `heard` that the agent got with these `fingerprints`."""
        if not fingerprints:
            return
        contents = tuple(fingerprint.content for fingerprint in fingerprints)
        run = Run(contents, tuple(Original(original) for original in originals))
        by_length = self._by_start.setdefault((agent, endpoint, contents[0]), {})
        runs = by_length.setdefault(len(contents), {}).setdefault(contents[-1], {}).setdefault(contents, {})
        runs.pop(heard, None)
        runs[heard] = run
        for fingerprint in fingerprints:
            if fingerprint.id is not None:
                self._by_id[agent, endpoint, fingerprint.id] = run

    def match(
        self,
        agent: Dialect,
        endpoint: Dialect,
        fingerprints: Sequence[Fingerprint],
        at: int,
        items: Any,
        position: int,
    ) -> Run | None:
        """Return the longest recorded run that starts at position `at` of `fingerprints`, at `position` in the request's `items`.

        Of several with these contents: the one with this id, the one given to what stands before it there, the latest.
        """
        by_length = self._by_start.get((agent, endpoint, fingerprints[at].content), {})
        for length in sorted(by_length, reverse=True):
            end = at + length
            runs = by_length[length].get(fingerprints[end - 1].content) if end <= len(fingerprints) else None
            if runs is None:
                continue
            here = tuple(fingerprint.content for fingerprint in fingerprints[at:end])
            if (same := runs.get(here)) is not None:
                by_id = self._by_id.get((agent, endpoint, fingerprints[at].id or ""))
                if by_id is not None and by_id.contents == here:
                    return by_id
                latest = next(reversed(same.values()))
                return latest if len(same) == 1 else same.get(heard_before(items, position), latest)
        return None


def heard_before(items: Any, at: int) -> int:
    """Return a hash of the last item before position `at` that is not the assistant's, without marks for caches, which
    move; 0 without one."""
    while at > 0:
        at -= 1
        item = items[at]
        if isinstance(item, dict) and (item.get("role") not in (None, "assistant") or "output" in item):
            said = item["output"] if "output" in item else item.get("content")
            parts = said if isinstance(said, list) else [{"type": "text", "text": said}]
            bare = [without(part, "cache_control") if isinstance(part, dict) else part for part in parts]
            return hash((item.get("call_id") or item.get("tool_call_id"), canonical_json(bare)))
    return 0


def fingerprints_of_answer(answer: Json, dialect: Dialect) -> list[Fingerprint]:
    """Fingerprints of an answer as an agent gets it, in the order in which it will send it back."""
    if dialect == "responses":
        return [item_fingerprint(item) for item in answer["output"]]
    if dialect == "chat":
        return [message_fingerprint(answer["choices"][0]["message"])]
    return [block_fingerprint(block) for block in answer["content"]]


def item_fingerprint(item: Json) -> Fingerprint:
    """The fingerprint of an assistant's Responses item."""
    kind, item_id = str(item.get("type") or "message"), item.get("id")
    called = (str(item.get("call_id")), str(item.get("name")))
    content: Content
    if kind == "message":
        content = text_and_refusal(item.get("content"))
    elif kind == "reasoning":
        content = (item_reasoning(item),)
    elif kind == "function_call":
        content = (*called, canonical_json(item.get("arguments")))
    elif kind == "custom_tool_call":
        content = (*called, str(item.get("input")))
    else:
        content = (canonical_json(without_none(item)),)
    return Fingerprint((kind, *content), item_id if isinstance(item_id, str) else None)


def message_fingerprint(message: Json) -> Fingerprint:
    """The fingerprint of an assistant's chat message."""
    text, refusal = text_and_refusal(message.get("content"))
    calls = [part for call in message.get("tool_calls") or [] for part in _tool_call_content(call)]
    refusal = refusal or str(message.get("refusal") or "")
    return Fingerprint(("assistant", text, refusal, message_reasoning(message)[0], *calls))


def _tool_call_content(call: Json) -> tuple[str, ...]:
    custom, function = call.get("custom"), call.get("function")
    if isinstance(custom, dict):
        return ("custom", str(call.get("id")), str(custom.get("name")), str(custom.get("input")))
    function = function if isinstance(function, dict) else {}
    name, arguments = str(function.get("name")), canonical_json(function.get("arguments"))
    return ("function", str(call.get("id")), name, arguments)


def block_fingerprint(block: Json) -> Fingerprint:
    """The fingerprint of a content block of an assistant's Anthropic message."""
    kind = str(block.get("type"))
    if kind in ("text", "thinking"):
        return Fingerprint((kind, str(block.get(kind) or "")))
    if kind == "tool_use":
        return Fingerprint(
            (kind, str(block.get("id")), str(block.get("name")), canonical_json(block.get("input")))
        )
    return Fingerprint((kind, canonical_json(block)))
