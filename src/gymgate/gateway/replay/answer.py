"""A recorded or scripted turn as the complete Responses object that a model server would have returned."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from gymgate.gateway.replay.conversation import Item
from gymgate.gateway.replay.index import Match

_DEFAULT_MODEL = "replay"


def recorded_answer(match: Match, body: Mapping[str, Any]) -> dict[str, Any]:
    """The matched turn. The record of a rollout keeps the last call's id and end and, summed over its calls,
    the usage: so usage is only given for a rollout of one call, and other ids are derived from the last one."""
    recording, turn = match.recording, match.turn
    response, last = recording.response, turn == len(recording.steps) - 1
    answer = response_object(
        match.step.output,
        body,
        response_id=_response_id(str(response.get("id") or ""), recording.name, turn, last),
        model=str(response.get("model") or "") or None,
        created_at=int(response.get("created_at") or 0),
        usage=_usage(response.get("usage")) if len(recording.steps) == 1 else None,
    )
    if last and (details := response.get("incomplete_details")):
        answer.update(status="incomplete", incomplete_details=details)
    return answer


def response_object(
    output: Sequence[Item],
    body: Mapping[str, Any],
    *,
    response_id: str,
    model: str | None = None,
    created_at: int = 0,
    usage: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A Responses object with every field that clients require; what the request asked for is echoed."""
    parallel = body.get("parallel_tool_calls")
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "model": model or body.get("model") or _DEFAULT_MODEL,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "output": [complete_item(item, f"{response_id}-{n}") for n, item in enumerate(output)],
        "parallel_tool_calls": True if parallel is None else parallel,
        "temperature": body.get("temperature"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "usage": usage,
    }


def complete_item(item: Item, seed: str) -> dict[str, Any]:
    """An output item with the fields that clients require; short forms (text as content) are spelled out."""
    kind = item.get("type") or "message"
    if kind == "message":
        return {
            **item,
            "id": item.get("id") or _derived("msg", seed),
            "type": "message",
            "role": "assistant",
            "status": item.get("status") or "completed",
            "content": [_complete_part(part) for part in _parts(item.get("content"))],
        }
    if kind == "function_call":
        return {
            **item,
            "id": item.get("id") or _derived("fc", seed),
            "call_id": item.get("call_id") or _derived("call", seed),
            "status": item.get("status") or "completed",
        }
    if kind == "reasoning":
        return {**item, "id": item.get("id") or _derived("rs", seed), "summary": item.get("summary") or []}
    return dict(item)


def _parts(content: Any) -> list[Any]:
    return [content] if isinstance(content, str) else list(content or [])


def _complete_part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        part = {"type": "output_text", "text": part}
    return {"annotations": [], **part} if part.get("type") == "output_text" else dict(part)


def _response_id(recorded: str, name: str, turn: int, last: bool) -> str:
    return recorded if last and recorded else _derived("resp", f"{recorded or name}/{turn}")


def _usage(usage: Any) -> dict[str, Any] | None:
    """The recorded usage with its detail fields; `None` if it lacks a count."""
    if not isinstance(usage, dict) or not {"input_tokens", "output_tokens", "total_tokens"} <= usage.keys():
        return None
    return {
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
        **{key: value for key, value in usage.items() if value is not None},
    }


def _derived(prefix: str, seed: str) -> str:
    return f"{prefix}_{hashlib.blake2b(seed.encode(), digest_size=16).hexdigest()}"
