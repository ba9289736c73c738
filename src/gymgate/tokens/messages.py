"""Chat messages on their way into a renderer, and completions on their way out of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gymgate import codec
from gymgate.tokens.engines.base import Sample

Message = dict[str, Any]


def renderable(messages: Sequence[Message]) -> list[Message]:
    """Messages as the renderer wants them: each with a content, developer as system."""
    return [_renderable(message) for message in messages]


def _renderable(message: Message) -> Message:
    out = {name: value for name, value in message.items() if value is not None}
    out["content"] = out.get("content") or ""
    if out["role"] == "developer":
        out["role"] = "system"
    return out


def tool_specs(tools: Iterable[Any] | None) -> list[Any] | None:
    """The functions of a request's `tools`."""
    return None if tools is None else [tool.get("function", tool) for tool in tools]


def history_hashes(messages: Sequence[Message], tools: list[Any] | None) -> list[int]:
    """One hash for each prefix of `messages`, equal for equal prefixes under equal tools."""
    history, hashes = hash(codec.dumps(tools, sort_keys=True)), []
    for message in messages:
        history = history_hash(history, message)
        hashes.append(history)
    return hashes


def history_hash(history: int, message: Message) -> int:
    """The hash of a history that goes on with `message`."""
    known = {name: value for name, value in message.items() if value not in (None, [], "")}
    return hash((history, codec.dumps(known, sort_keys=True)))


def assistant_message(parsed: Any, name_call: str) -> Message:
    """A parsed completion as a chat message; malformed tool calls stay visible as text."""
    calls = [call for call in parsed.tool_calls or [] if _is_complete(call)]
    broken = [call.raw for call in parsed.tool_calls or [] if call not in calls]
    message: Message = {"role": "assistant", "content": "\n".join(filter(None, [parsed.content, *broken]))}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    if calls:
        message["tool_calls"] = chat_tool_calls(calls, name_call)
    return message


def chat_tool_calls(calls: Sequence[Any], name_call: str) -> list[Message]:
    """Parsed calls as a chat message has them; those without an id get one of `name_call`."""
    return [
        {
            "id": call.id or f"call_{name_call}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": _arguments(call.arguments)},
        }
        for number, call in enumerate(calls)
    ]


def _is_complete(call: Any) -> bool:
    """Whether it can be made. One that only has an argument its tool does not declare can: the tool is to say so.

    XML formats call that `invalid_json`, which JSON formats say of a call that has no name either.
    """
    status = str(call.status)
    return bool(call.name) and (status == "ok" or (status == "invalid_json" and call.arguments is not None))


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value if value is not None else {})


def chat_answer(
    answer_id: str,
    request: Mapping[str, Any],
    message: Message,
    prompt_ids: list[int],
    sample: Sample,
    *,
    with_ids: bool,
) -> dict[str, Any]:
    """A chat completion; with ids, it carries them as vLLM's `return_token_ids` does."""
    finish = sample.finish_reason
    if finish == "stop" and message.get("tool_calls"):
        finish_reason = "tool_calls"
    else:
        finish_reason = "length" if finish in ("length", "abort") else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
    used = (len(prompt_ids), len(sample.token_ids))
    answer: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion",
        "created": 0,
        "model": request.get("model") or "policy",
        "choices": [choice],
        "usage": {"prompt_tokens": used[0], "completion_tokens": used[1], "total_tokens": sum(used)},
    }
    if with_ids:
        choice |= {"token_ids": list(sample.token_ids), "logprobs": _logprobs(sample)}
        answer["prompt_token_ids"] = prompt_ids
    return answer


def _logprobs(sample: Sample) -> dict[str, Any] | None:
    if sample.logprobs is None:
        return None
    pairs = zip(sample.token_ids, sample.logprobs, strict=True)
    return {"content": [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]}
