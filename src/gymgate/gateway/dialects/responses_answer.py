"""A Responses answer: checked, and as a chat completion."""

from __future__ import annotations

import time
from typing import Any

from gymgate.errors import PolicyError
from gymgate.gateway.dialects._read import Json, answer_list, as_text, joined_text, new_id
from gymgate.gateway.dialects.reasoning import item_reasoning
from gymgate.gateway.dialects.usage import finish_reason_of, responses_usage_to_chat


def checked_responses_answer(answer: Json) -> Json:
    """`answer`; `PolicyError` if it is no Responses object, or one whose generation failed."""
    items = answer_list(answer, "output", "Responses object")
    status = answer.get("status")
    if status not in ("completed", "incomplete", None):
        error = answer.get("error")
        said = error.get("message") if isinstance(error, dict) else error
        raise PolicyError(f"the endpoint's response has status {status!r}: {said or 'no message'}")
    for item in items:
        if item.get("type") == "function_call" and not (item.get("call_id") and item.get("name")):
            raise PolicyError(
                f"the endpoint's answer has a function call without call_id or name: {item!r:.200}"
            )
    return answer


def responses_answer_to_chat(answer: Json, request: Json) -> Json:
    """The chat completion that says the same as a checked Responses answer."""
    logprobs = _logprobs(answer["output"]) if request.get("logprobs") else None
    created = answer.get("created_at")
    completion: Json = {
        "id": str(answer.get("id") or new_id("chatcmpl")),
        "object": "chat.completion",
        "created": int(created if isinstance(created, int | float) else time.time()),
        "model": answer.get("model") or request.get("model") or "",
        "choices": [
            {
                "index": 0,
                "message": _message(answer["output"]),
                "logprobs": logprobs,
                "finish_reason": finish_reason_of(answer, "responses"),
            }
        ],
        "usage": responses_usage_to_chat(answer.get("usage")),
    }
    if answer.get("service_tier") is not None:
        completion["service_tier"] = answer["service_tier"]
    return completion


def _message(items: list[Json]) -> Json:
    parts = [part for item in items if item.get("type", "message") == "message" for part in _parts(item)]
    refusal = "".join(str(part.get("refusal") or "") for part in parts)
    reasoning = "\n\n".join(filter(None, (item_reasoning(i) for i in items if i.get("type") == "reasoning")))
    calls = [_call(item) for item in items if item.get("type") in ("function_call", "custom_tool_call")]
    content = joined_text(parts)
    message: Json = {
        "role": "assistant",
        "content": content if content or not (calls or refusal) else None,
        "refusal": refusal or None,
    }
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _parts(item: Json) -> list[Any]:
    content = item.get("content")
    parts = [{"type": "output_text", "text": content}] if isinstance(content, str) else content or []
    return [part for part in parts if isinstance(part, dict)]


def _call(item: Json) -> Json:
    call_id = item.get("call_id")
    if item.get("type") == "custom_tool_call":
        custom = {"name": item.get("name"), "input": item.get("input") or ""}
        return {"id": call_id, "type": "custom", "custom": custom}
    arguments = item.get("arguments")
    function = {"name": item.get("name"), "arguments": "{}" if arguments is None else as_text(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _logprobs(items: list[Json]) -> Json | None:
    messages = (item for item in items if item.get("type") == "message")
    content = [entry for item in messages for part in _parts(item) for entry in part.get("logprobs") or []]
    return {"content": content, "refusal": None} if content else None
