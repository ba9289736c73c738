"""Anthropic's message events."""

from __future__ import annotations

from collections.abc import Iterator

from gymgate import codec
from gymgate.gateway.dialects._event import event
from gymgate.gateway.dialects._read import Json


def messages_events(answer: Json) -> Iterator[bytes]:
    """`message_start`, each block's start, deltas and stop, `message_delta`, `message_stop`."""
    usage = answer.get("usage") or {}
    start = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
    start["usage"] = {**usage, "output_tokens": 0}
    yield _event({"type": "message_start", "message": start})
    for index, block in enumerate(answer.get("content") or []):
        shell, deltas = _opened(block)
        yield _event({"type": "content_block_start", "index": index, "content_block": shell})
        for delta in deltas:
            yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": answer.get("stop_reason"), "stop_sequence": answer.get("stop_sequence")}
    yield _event({"type": "message_delta", "delta": stop, "usage": usage})
    yield _event({"type": "message_stop"})


def _event(data: Json) -> bytes:
    return event(data, data["type"])


def _opened(block: Json) -> tuple[Json, list[Json]]:
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
