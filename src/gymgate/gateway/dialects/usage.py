"""Token counts and the reason a model stopped, in every dialect's words."""

from __future__ import annotations

from typing import Any

from gymgate.config import Dialect
from gymgate.gateway.dialects._read import Json, objects, part_of
from gymgate.rollout.record import Usage


def usage_of(answer: Json, dialect: Dialect) -> Usage:
    """`input_tokens` counts cached ones too, in every dialect; `None` where the endpoint did not say."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return Usage()
    if dialect == "chat":
        return _openai_usage(usage, "prompt", "completion")
    if dialect == "responses":
        return _openai_usage(usage, "input", "output")
    return _anthropic_usage(usage)


def _openai_usage(usage: Json, read: str, written: str) -> Usage:
    return Usage(
        input_tokens=_count(usage.get(f"{read}_tokens")),
        output_tokens=_count(usage.get(f"{written}_tokens")),
        cached_tokens=_count(_detail(usage, f"{read}_tokens_details", "cached_tokens")),
        reasoning_tokens=_count(_detail(usage, f"{written}_tokens_details", "reasoning_tokens")),
    )


def _anthropic_usage(usage: Json) -> Usage:
    """Anthropic counts uncached, cached and newly cached input apart."""
    cached, made = (
        _count(usage.get("cache_read_input_tokens")),
        _count(usage.get("cache_creation_input_tokens")),
    )
    read = _count(usage.get("input_tokens"))
    return Usage(
        input_tokens=None if read is None else read + (cached or 0) + (made or 0),
        output_tokens=_count(usage.get("output_tokens")),
        cached_tokens=cached,
        reasoning_tokens=_count(_detail(usage, "output_tokens_details", "thinking_tokens")),
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _detail(usage: Json, group: str, name: str) -> Any:
    """SGLang and others put the details beside the totals."""
    details = usage.get(group)
    return details.get(name) if isinstance(details, dict) else usage.get(name)


def chat_usage_to_responses(usage: Any) -> Json | None:
    """Responses counts are never absent; an unknown detail is 0, which nemo-gym 0.4.0's model insists on."""
    if not isinstance(usage, dict):
        return None
    counts = usage_of({"usage": usage}, "chat")
    read, written = counts.input_tokens or 0, counts.output_tokens or 0
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens or 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens or 0},
        "total_tokens": _or_sum(usage, read, written),
    }


def with_usage_details(answer: Json) -> Json:
    """A Responses answer whose usage, if it has one, lacks no detail: an unknown one is 0, or NeMo Gym refuses it.

    The same object comes back where nothing was missing.
    """
    usage = answer.get("usage")
    if not isinstance(usage, dict) or _is_detailed(usage):
        return answer
    counts = usage_of(answer, "responses")
    read, written = counts.input_tokens or 0, counts.output_tokens or 0
    known = {
        "input_tokens": read,
        "input_tokens_details": _with_count(
            usage.get("input_tokens_details"), "cached_tokens", counts.cached_tokens
        ),
        "output_tokens": written,
        "output_tokens_details": _with_count(
            usage.get("output_tokens_details"), "reasoning_tokens", counts.reasoning_tokens
        ),
        "total_tokens": _or_sum(usage, read, written),
    }
    return {**answer, "usage": {**usage, **known}}


def _is_detailed(usage: Json) -> bool:
    totals = (usage.get(name) for name in ("input_tokens", "output_tokens", "total_tokens"))
    details = (
        part_of(usage, "input_tokens_details").get("cached_tokens"),
        part_of(usage, "output_tokens_details").get("reasoning_tokens"),
    )
    return all(_count(value) is not None for value in (*totals, *details))


def _with_count(details: Any, name: str, count: int | None) -> Json:
    return {**(details if isinstance(details, dict) else {}), name: count or 0}


def responses_usage_to_chat(usage: Any) -> Json | None:
    if not isinstance(usage, dict):
        return None
    counts = usage_of({"usage": usage}, "responses")
    read, written = counts.input_tokens or 0, counts.output_tokens or 0
    chat: Json = {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": _or_sum(usage, read, written),
    }
    if counts.cached_tokens is not None:
        chat["prompt_tokens_details"] = {"cached_tokens": counts.cached_tokens}
    if counts.reasoning_tokens is not None:
        chat["completion_tokens_details"] = {"reasoning_tokens": counts.reasoning_tokens}
    return chat


def _or_sum(usage: Json, read: int, written: int) -> int:
    total = _count(usage.get("total_tokens"))
    return read + written if total is None else total


def chat_usage_to_anthropic(usage: Any) -> Json:
    counts = usage_of({"usage": usage}, "chat")
    cached = min(counts.cached_tokens or 0, counts.input_tokens or 0)
    return {
        "input_tokens": (counts.input_tokens or 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts.output_tokens or 0,
    }


_ANTHROPIC_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}
_RESPONSES_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}


def finish_reason_of(answer: Json, dialect: Dialect) -> str | None:
    """Why the model stopped, in chat-completions' words: stop, length, tool_calls, content_filter."""
    if dialect == "chat":
        reason = next((choice.get("finish_reason") for choice in objects(answer.get("choices"))), None)
        return None if reason is None else str(reason)
    if dialect == "messages":
        reason = answer.get("stop_reason")
        return None if reason is None else _ANTHROPIC_REASONS.get(str(reason), str(reason))
    return _responses_reason(answer)


def _responses_reason(answer: Json) -> str | None:
    if answer.get("status") not in ("completed", "incomplete", None):
        return None
    reason = part_of(answer, "incomplete_details").get("reason")
    if reason is not None:
        return _RESPONSES_REASONS.get(str(reason), str(reason))
    if answer.get("status") == "incomplete":
        return "length"
    kinds = {str(item.get("type")) for item in objects(answer.get("output"))}
    return "tool_calls" if kinds & {"function_call", "custom_tool_call"} else "stop"
