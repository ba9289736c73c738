"""A conversation in a form that does not depend on the dialect it travelled in.

Agents speak Responses, chat or messages; on the way, items are grouped, split, reordered and stripped of reasoning. The
form keeps who said what: blocks of consecutive items of one role, each with its text, media, tool calls (name and
arguments) and tool outputs (in the order of their calls). It ignores whitespace, call ids, item ids, reasoning and the
tools on offer, and takes `developer` and `instructions` as `system`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gymgate.core import codec
from gymgate.gateway.dialects.reading import canonical_json, without
from gymgate.rollouts.row import input_items

Item = Mapping[str, Any]
"""One input or output item of the Responses API."""
Role = Literal["system", "user", "assistant", "tool"]
_MEDIA = ("image_url", "file_id", "file_data", "file_url", "input_audio", "audio_url", "video_url", "video")
"""Fields of a part that identify what it shows."""

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


@dataclass(slots=True)
class Block:
    """The consecutive items of one role; `text` is for people, `compared_parts` for comparing."""

    role: Role
    texts: list[str] = field(default_factory=list)
    media: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[tuple[int, str]] = field(default_factory=list)
    """(position of the call, text), position by arrival where the call is unknown."""

    @property
    def text(self) -> str:
        parts = [*self.texts, *(f"{name}({arguments})" for name, arguments in self.calls)]
        return " ".join([*parts, *(text for _, text in sorted(self.outputs)), *self.media])

    def compared_parts(self) -> tuple[Any, ...]:
        """The parts that are compared between two blocks."""
        outputs = tuple(_squeeze(text) for _, text in sorted(self.outputs, key=lambda output: output[0]))
        return self.role, _squeeze("".join(self.texts)), tuple(self.media), tuple(self.calls), outputs


def items_of(body: Mapping[str, Any]) -> list[Item]:
    """Return the items of a Responses request: its instructions as a system message, then its input.

    A clip in its metadata, where NeMo Gym's rows have it, comes first.
    """
    items: list[Item] = input_items(body)
    if instructions := body.get("instructions"):
        items.insert(0, {"role": "system", "content": instructions})
    metadata = body.get("metadata")
    if isinstance(metadata, Mapping) and (clip := metadata.get("audio_data")):
        items.insert(0, {"role": "system", "content": [{"type": "input_audio", "input_audio": clip}]})
    return items


def is_policy_item(item: Item) -> bool:
    """Whether a model wrote the item: an assistant's message, reasoning, or a call of any kind."""
    kind = item.get("type") or "message"
    if kind == "message":
        return item.get("role") == "assistant"
    return not kind.endswith("_output")


def blocks_of(items: Iterable[Item]) -> list[Block]:
    """Return the canonical form of a conversation; a turn of reasoning alone leaves no trace in it."""
    blocks: list[Block] = []
    order: dict[str, int] = {}
    for item in items:
        role = _role(item)
        if role is None:
            continue
        if not blocks or blocks[-1].role != role:
            blocks.append(Block(role))
        _add(blocks[-1], item, order)
        if role == "assistant" and blocks[-1].compared_parts() == ("assistant", "", (), (), ()):
            blocks.pop()
    return _join(blocks)


def call_ids(items: Iterable[Item]) -> frozenset[str]:
    """Return the ids of the tool calls in a conversation."""
    return frozenset(str(item["call_id"]) for item in items if item.get("type") == "function_call")


def prefix_keys(blocks: Sequence[Block]) -> list[bytes]:
    """Return a key for each beginning of a conversation: for none of its blocks, the first one, and so on to all."""
    keys = [b""]
    for block in blocks:
        keys.append(_digest([keys[-1].hex(), block.compared_parts()]))
    return keys


def exact_key(blocks: Sequence[Block]) -> bytes:
    """A key that is equal for two conversations in which every role said the same."""
    return prefix_keys(blocks)[-1]


def opening_keys(blocks: Sequence[Block]) -> set[bytes]:
    """The keys of all beginnings but the empty one, those that end between two messages of one role included."""
    keys = prefix_keys(blocks)
    return {*keys[1:]} | {
        _digest([key.hex(), replace(block, texts=block.texts[:end]).compared_parts()])
        for key, block in zip(keys, blocks, strict=False)
        for end in range(1, len(block.texts))
    }


def policy_key(blocks: Sequence[Block]) -> bytes:
    """A key that is equal for two conversations in which the assistant said the same, whatever the others said."""
    turns = [block for block in blocks if block.role == "assistant"]
    text = _squeeze("".join(text for block in turns for text in block.texts))
    return _digest(
        [text, [m for block in turns for m in block.media], [c for block in turns for c in block.calls]]
    )


def says_all_of(blocks: Sequence[Block], recorded: Sequence[Block]) -> bool:
    """Whether system and user say everything that they say in `recorded`, in the same order, and maybe more."""
    said, position = "".join(_spoken(blocks)), 0
    for part in _spoken(recorded):
        if (start := said.find(part, position)) < 0:
            return False
        position = start + len(part)
    return True


def _spoken(blocks: Sequence[Block]) -> list[str]:
    spoken = [block for block in blocks if block.role in ("system", "user")]
    return [part for block in spoken for part in (*map(_squeeze, block.texts), *block.media)]


def _role(item: Item) -> Role | None:
    kind = item.get("type") or "message"
    if kind == "message":
        return _ROLES.get(str(item.get("role")))
    if kind == "reasoning":
        return None
    return "tool" if kind.endswith("_output") else "assistant"


def _add(block: Block, item: Item, order: dict[str, int]) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        _add_content(block, item.get("content"))
    elif block.role == "tool":
        output = Block("tool")
        _add_content(output, item.get("output"))
        position = order.get(str(item.get("call_id")), len(order) + len(block.outputs))
        block.outputs.append((position, "".join(output.texts)))
        block.media.extend(output.media)
    elif kind == "function_call":
        order[str(item.get("call_id"))] = len(order)
        block.calls.append((str(item.get("name")), canonical_json(item.get("arguments") or {}).strip()))
    else:
        block.calls.append((kind, canonical_json(without(item, "id", "status"))))


def _add_content(block: Block, content: Any) -> None:
    for part in [content] if isinstance(content, str) else content or []:
        if isinstance(part, str):
            block.texts.append(part)
        elif isinstance(text := part.get("text", part.get("refusal")), str):
            block.texts.append(text)
        else:
            block.media.append(f"<{part.get('type')} {_digest(_medium(part)).hex()[:12]}>")


def _medium(part: Mapping[str, Any]) -> Any:
    """The URL or data that identifies an image, clip or file, without display options; of other parts, all that they hold."""
    url = next((part[name] for name in _MEDIA if part.get(name)), part)
    return url.get("url", url) if isinstance(url, dict) else url


def _join(blocks: list[Block]) -> list[Block]:
    """Join neighbouring blocks of one role, between which a turn said nothing."""
    joined: list[Block] = []
    for block in blocks:
        if joined and joined[-1].role == block.role:
            for name in ("texts", "media", "calls", "outputs"):
                getattr(joined[-1], name).extend(getattr(block, name))
        else:
            joined.append(block)
    return joined


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(codec.dumps(value), digest_size=16).digest()
