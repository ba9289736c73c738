"""A chat-completions answer: checked, and as a Responses object."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from gymgate.errors import PolicyError
from gymgate.gateway.dialects._read import Json, answer_list, as_text, joined_text, new_id
from gymgate.gateway.dialects.memory import THINK_TAGS, ReasoningStyle
from gymgate.gateway.dialects.reasoning import message_reasoning, split_think_tags
from gymgate.gateway.dialects.responses_request import wants_logprobs
from gymgate.gateway.dialects.usage import chat_usage_to_responses

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ECHOED = (
    *("background", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt", "service_tier"),
    *("text", "top_logprobs", "truncation", "user", "prompt_cache_key", "safety_identifier", "store"),
)


class Reply(NamedTuple):
    """What the model said, wherever its endpoint put it."""

    reasoning: list[str]
    style: ReasoningStyle | None
    """How the endpoint carried the reasoning; `None` if there was none."""
    text: str
    refusal: str
    tool_calls: list[Json]
    finish_reason: str


def checked_chat_answer(answer: Json) -> Json:
    """`answer` with one choice and an id on every call; `PolicyError` says what is wrong with it otherwise."""
    choices = answer_list(answer, "choices", "chat completion")
    if not choices:
        raise PolicyError("the endpoint's answer is not a chat completion: 'choices' is empty")
    message = choices[0].get("message")
    if not isinstance(message, dict):
        raise PolicyError(
            f"the endpoint's answer is not a chat completion: choices[0].message is {message!r}"
        )
    if choices[0].get("finish_reason") == "error":
        said = choices[0].get("error") or answer.get("error") or "no message"
        raise PolicyError(f"the endpoint's answer has finish_reason 'error': {said!r:.200}")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise PolicyError(f"the endpoint's answer has tool_calls that are no list of objects: {calls!r:.200}")
    if all(call.get("id") for call in calls) and message.get("role") == "assistant":
        return answer
    named = [call if call.get("id") else {**call, "id": new_id("call")} for call in calls]
    fixed = {**message, "role": "assistant", **({"tool_calls": named} if named else {})}
    return {**answer, "choices": [{**choices[0], "message": fixed}, *choices[1:]]}


def read_reply(answer: Json) -> Reply:
    """Of a checked answer; `<think>` tags count as reasoning where no field carries it, as in Gym's server."""
    choice = answer["choices"][0]
    message = choice["message"]
    content = message.get("content")
    text = content if isinstance(content, str) else joined_text(content or [])
    reasoning, style = message_reasoning(message)
    thoughts = [reasoning] if reasoning else []
    if not thoughts:
        thoughts, text = split_think_tags(text)
        thoughts = [thought for thought in thoughts if thought]
        style = THINK_TAGS if thoughts else None
    calls = message.get("tool_calls") or []
    finish = str(choice.get("finish_reason") or ("tool_calls" if calls else "stop"))
    return Reply(thoughts, style, text, str(message.get("refusal") or ""), calls, finish)


def chat_answer_to_responses(answer: Json, request: Json) -> Json:
    """A complete Responses object for a checked chat answer to `request` (the agent's Responses request)."""
    reply = read_reply(answer)
    reason = _INCOMPLETE.get(reply.finish_reason)
    logprobs = answer["choices"][0].get("logprobs") if wants_logprobs(request) else None
    created = answer.get("created")
    return {
        "id": new_id("resp"),
        "object": "response",
        # An integer: verifiers and others refuse a fraction.
        "created_at": int(created if isinstance(created, int | float) else time.time()),
        "status": "incomplete" if reason else "completed",
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "instructions": request.get("instructions"),
        "metadata": request.get("metadata") or {},
        "model": answer.get("model") or request.get("model") or "",
        "output": _output(reply, _output_logprobs(logprobs), "incomplete" if reason else "completed"),
        "parallel_tool_calls": _or(request.get("parallel_tool_calls"), True),
        "temperature": request.get("temperature"),
        "tool_choice": _or(request.get("tool_choice"), "auto"),
        "tools": request.get("tools") or [],
        "top_p": request.get("top_p"),
        "reasoning": request.get("reasoning"),
        "usage": chat_usage_to_responses(answer.get("usage")),
        **{name: request[name] for name in _ECHOED if request.get(name) is not None},
    }


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _output(reply: Reply, logprobs: list[Json] | None, status: str) -> list[Json]:
    """Reasoning, message, calls.

    There is always a message or a call, if only an empty message: without one nemo-gym 0.4.0's simple_agent asks
    again for ever, and environments that look for the last message fail instead of scoring the empty text.
    """
    items: list[Json] = []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": thought} for thought in reply.reasoning]
        items.append({"id": new_id("rs"), "type": "reasoning", "summary": summary})
    if reply.text or reply.refusal or not reply.tool_calls:
        items.append(_message_item(reply, logprobs, status))
    return [*items, *map(_call_item, reply.tool_calls)]


def _message_item(reply: Reply, logprobs: list[Json] | None, status: str) -> Json:
    content: list[Json] = []
    if reply.text or not reply.refusal:
        text: Json = {"type": "output_text", "text": reply.text, "annotations": []}
        content.append(text if logprobs is None else {**text, "logprobs": logprobs})
    if reply.refusal:
        content.append({"type": "refusal", "refusal": reply.refusal})
    return {"id": new_id("msg"), "type": "message", "role": "assistant", "status": status, "content": content}


def _call_item(call: Json) -> Json:
    name, given = call_of(call)
    if call.get("custom") is not None:
        item: Json = {"id": new_id("ctc"), "type": "custom_tool_call"}
        return {**item, "call_id": call["id"], "name": name, "input": given}
    item = {"id": new_id("fc"), "type": "function_call"}
    return {**item, "call_id": call["id"], "name": name, "arguments": given, "status": "completed"}


def call_of(call: Json) -> tuple[str, str]:
    """Name and arguments (JSON text, or a custom tool's input) of a tool call."""
    custom, function = call.get("custom"), call.get("function")
    if isinstance(custom, dict):
        return _name(custom), as_text(_or(custom.get("input"), ""))
    if not isinstance(function, dict):
        raise PolicyError(f"the endpoint's answer has a tool call that is no function call: {call!r:.200}")
    return _name(function), as_text(_or(function.get("arguments"), "{}"))


def _name(function: Json) -> str:
    name = function.get("name")
    if not isinstance(name, str):
        raise PolicyError(f"the endpoint's answer has a tool call without a name: {function!r:.200}")
    return name


def _output_logprobs(logprobs: Any) -> list[Json] | None:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        return None
    return [
        {**_logprob(e), "top_logprobs": [_logprob(top) for top in e.get("top_logprobs") or []]}
        for e in content
    ]


def _logprob(entry: Json) -> Json:
    token = str(entry.get("token"))
    return {
        "token": token,
        "bytes": _or(entry.get("bytes"), list(token.encode())),
        "logprob": entry.get("logprob"),
    }
