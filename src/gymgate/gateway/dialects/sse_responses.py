"""Responses events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymgate.gateway.dialects._event import event
from gymgate.gateway.dialects._read import Json


def responses_events(answer: Json) -> Iterator[bytes]:
    """`created`, `in_progress`, the events of each item, and `completed`, `incomplete` or `failed`; numbered."""
    for number, (kind, fields) in enumerate(_events(answer)):
        yield event({"type": kind, "sequence_number": number, **fields}, kind)


_Events = Iterator[tuple[str, Json]]


def _events(answer: Json) -> _Events:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(answer.get("output") or []):
        yield "response.output_item.added", {"output_index": index, "item": _opened(item)}
        yield from _inside(item, {"item_id": item.get("id"), "output_index": index})
        yield "response.output_item.done", {"output_index": index, "item": item}
    status = answer.get("status")
    end = status if status in ("incomplete", "failed") else "completed"
    yield f"response.{end}", {"response": answer}


def _opened(item: Json) -> Json:
    """An item as it starts: nothing written in it yet. Items of other types start whole."""
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
    elif kind == "function_call":
        arguments = item.get("arguments") or ""
        yield "response.function_call_arguments.delta", {**where, "delta": arguments}
        yield (
            "response.function_call_arguments.done",
            {**where, "name": item.get("name"), "arguments": arguments},
        )
    elif kind == "custom_tool_call":
        given = item.get("input") or ""
        yield "response.custom_tool_call_input.delta", {**where, "delta": given}
        yield "response.custom_tool_call_input.done", {**where, "input": given}


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
    yield "response.content_part.added", {**where, "part": _empty(part, field)}
    yield f"response.{name}.delta", {**where, "delta": text, **extra}
    yield f"response.{name}.done", {**where, field: text, **extra}
    yield "response.content_part.done", {**where, "part": part}


def _empty(part: Json, field: str) -> Json:
    empty = {**part, field: ""}
    if "logprobs" in empty:
        empty["logprobs"] = []
    return empty
