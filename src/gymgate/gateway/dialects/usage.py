"""Reads an endpoint's answer: token counts, the reason why the model stopped, token ids and logprobs."""

from __future__ import annotations

from typing import Any, NamedTuple

from gymgate.core.config import Dialect
from gymgate.gateway.dialects.reading import Json, objects, part_of
from gymgate.rollouts.record import Usage

_TOKEN_ID = "token_id:"
_MOST_TOKENS = 1 << 32
"""Of one call. A larger count is none, and the sums of such counts could not be read again."""


def usage_of(answer: Json, dialect: Dialect) -> Usage:
    """Return the token counts; `None` where the endpoint gave none. `input_tokens` includes cached ones."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return Usage()
    names = ("prompt", "completion") if dialect == "chat" else ("input", "output")
    read, written = (_count(usage.get(f"{name}_tokens")) for name in names)
    reasoning = _count(_detail(usage, f"{names[1]}_tokens_details", "reasoning_tokens"))
    if (
        reasoning
        and read is not None
        and written is not None
        and usage.get("total_tokens") == read + written + reasoning
    ):
        written += reasoning  # xAI counts it beside the output's
    return Usage(
        input_tokens=read,
        output_tokens=written,
        cached_tokens=_count(_detail(usage, f"{names[0]}_tokens_details", "cached_tokens")),
        reasoning_tokens=reasoning,
    )


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS
    return value if is_count else None


def _detail(usage: Json, group: str, name: str) -> Any:
    """SGLang and others put the details beside the totals."""
    details = usage.get(group)
    return details.get(name) if isinstance(details, dict) else usage.get(name)


def with_usage_details(answer: Json, counts: Usage) -> Json:
    """Return a Responses answer whose usage, if it has one, lacks no detail; else NeMo Gym refuses it.

    The same object comes back where nothing was missing.
    """
    usage: Any = answer.get("usage")
    complete = usage_for_responses(counts, usage)
    if complete is None or all(usage.get(name) == value for name, value in complete.items()):
        return answer
    return {**answer, "usage": {**usage, **complete}}


def usage_for_responses(counts: Usage, usage: Any) -> Json | None:
    """Return the usage of a Responses object; `None` if the endpoint's answer has no `usage`.

    No count is absent: `openai`'s types require integers, so an unknown detail is 0 here. The record keeps it as `None`.
    """
    if not isinstance(usage, dict):
        return None
    read, written = counts.input_tokens or 0, counts.output_tokens or 0
    details = part_of(usage, "input_tokens_details")
    cache = {
        "cached_tokens": counts.cached_tokens or 0,
        "cache_write_tokens": _count(details.get("cache_write_tokens")) or 0,
    }
    reasoning = {"reasoning_tokens": counts.reasoning_tokens or 0}
    return {
        "input_tokens": read,
        "input_tokens_details": {**details, **cache},
        "output_tokens": written,
        "output_tokens_details": {**part_of(usage, "output_tokens_details"), **reasoning},
        "total_tokens": _or_sum(usage, read, written),
    }


def usage_for_chat(counts: Usage, usage: Any) -> Json | None:
    """Return the usage of a chat completion; `None` if the endpoint's answer has no `usage`."""
    if not isinstance(usage, dict):
        return None
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


_ANTHROPIC_NULLS = (
    *("cache_creation", "inference_geo", "output_tokens_details"),
    *("server_tool_use", "service_tier"),
)
"""Fields that the schema requires, and that only Anthropic's own service counts."""


def usage_for_messages(counts: Usage) -> Json:
    """Return the usage of an Anthropic message, which counts cached input apart."""
    # Whatever an endpoint counts: clients refuse a negative number.
    cached = min(counts.cached_tokens or 0, counts.input_tokens or 0)
    return {
        "input_tokens": (counts.input_tokens or 0) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts.output_tokens or 0,
        **dict.fromkeys(_ANTHROPIC_NULLS),
    }


_RESPONSES_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}


def finish_reason_of(answer: Json, dialect: Dialect) -> str | None:
    """Return why the model stopped, in chat-completions' words: stop, length, tool_calls, content_filter."""
    if dialect == "chat":
        reason = next((choice.get("finish_reason") for choice in objects(answer.get("choices"))), None)
        return None if reason is None else str(reason)
    if answer.get("status") not in ("completed", "incomplete", None):
        return None
    reason = part_of(answer, "incomplete_details").get("reason")
    if reason is not None:
        return _RESPONSES_REASONS.get(str(reason), str(reason))
    if answer.get("status") == "incomplete":
        return "length"
    kinds = {str(item.get("type")) for item in objects(answer.get("output"))}
    return "tool_calls" if kinds & {"function_call", "custom_tool_call"} else "stop"


class TokenData(NamedTuple):
    """Token ids and logprobs; `None` where the answer has none.

    Logprobs whose number differs from that of the ids are kept, so that training on them fails (`TokenDataError`) instead
    of taking them for missing.
    """

    prompt_ids: list[int] | None
    completion_ids: list[int] | None
    logprobs: list[float] | None


def token_data_of(answer: Json, dialect: Dialect) -> TokenData:
    """Return the token data of an answer as its endpoint gave it.

    Chat: vLLM's `return_token_ids` (`prompt_token_ids` of the answer, `token_ids` of the choice) or
    `return_tokens_as_token_ids` (tokens that read `token_id:17`). Chat and Responses: NeMo Gym's bundle of
    `prompt_token_ids`, `generation_token_ids`, `generation_log_probs` on the message or the last item.
    """
    prompt, completion, logprobs = _of_chat(answer) if dialect == "chat" else _of_responses(answer)
    return TokenData(_list_of(prompt, int), _list_of(completion, int), _list_of(logprobs, float))


def _of_chat(answer: Json) -> tuple[Any, Any, Any]:
    choice = next(iter(objects(answer.get("choices"))), {})
    message = part_of(choice, "message")
    content = objects(part_of(choice, "logprobs").get("content"))
    prompt = (
        message.get("prompt_token_ids") or answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    )
    completion = message.get("generation_token_ids") or choice.get("token_ids") or _ids_in_tokens(content)
    logprobs = message.get("generation_log_probs") or [entry.get("logprob") for entry in content]
    return prompt, completion, logprobs


def _of_responses(answer: Json) -> tuple[Any, Any, Any]:
    items = objects(answer.get("output"))
    bundle: Json = next((item for item in reversed(items) if "generation_token_ids" in item), {})
    if bundle:
        ids = bundle.get("generation_token_ids")
        return bundle.get("prompt_token_ids"), ids, bundle.get("generation_log_probs")
    messages = [item for item in items if item.get("type") == "message"]
    parts = [part for message in messages for part in objects(message.get("content"))]
    content = [entry for part in parts for entry in objects(part.get("logprobs"))]
    return None, _ids_in_tokens(content), [entry.get("logprob") for entry in content]


def _ids_in_tokens(content: list[Json]) -> list[str] | None:
    tokens = [str(entry.get("token")) for entry in content]
    if not tokens or not all(token.startswith(_TOKEN_ID) for token in tokens):
        return None
    digits = [token.removeprefix(_TOKEN_ID) for token in tokens]
    return digits if all(digit.isdecimal() for digit in digits) else None


def _list_of(value: Any, kind: type) -> list[Any] | None:
    """A list of numbers; Gym's own capture writes ids as decimal strings."""
    if not isinstance(value, list) or not value:
        return None
    try:
        return [kind(entry) for entry in value]
    except (OverflowError, TypeError, ValueError):
        return None
