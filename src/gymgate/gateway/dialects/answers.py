"""Endpoints' answers in the dialect of the agent that asked."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from gymgate.core import codec
from gymgate.core.config import Dialect
from gymgate.core.errors import PolicyError
from gymgate.gateway.dialects.content import (
    THINK_TAGS,
    ReasoningStyle,
    message_reasoning,
    said_in,
    split_think_tags,
)
from gymgate.gateway.dialects.reading import Json, as_text, joined_text, new_id, objects, part_of
from gymgate.gateway.dialects.responses_request import wants_logprobs
from gymgate.gateway.dialects.usage import (
    finish_reason_of,
    usage_for_chat,
    usage_for_messages,
    usage_for_responses,
)
from gymgate.rollouts.record import Usage

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_STOP_REASONS = {"length": "max_tokens", "content_filter": "refusal", "tool_calls": "tool_use"}
_SIGNATURE = "Z3ltZ2F0ZQ=="
"""Clients drop a thinking block whose signature is empty, or send it back as the user's text. Nothing reads it."""
MESSAGE_NULLS = ("stop_details", "container")
"""Fields that Anthropic's schema requires in a message and at the end of its stream, and that only its own service has."""
_LAST_SECOND = 1 << 40
_DEFAULTS: Mapping[str, Any] = {
    "background": False,
    "frequency_penalty": 0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "model": None,
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "temperature": 1,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1,
    "truncation": "disabled",
}
"""Fields of a Responses object, with the API's value where the request has none."""
_ECHOED = (*_DEFAULTS, "prompt", "user")
"""Parameters that it repeats if the request has them."""


class AnswerContent(NamedTuple):
    """An answer's content, wherever its endpoint put it."""

    reasoning: list[str]
    style: ReasoningStyle | None
    """How the endpoint carried the reasoning; `None` if there was none."""
    text: str
    refusal: str
    tool_calls: list[Json]
    finish_reason: str


def with_text_ids(answer: Json, dialect: Dialect) -> Json:
    """Return an answer whose ids are strings; the same object if they are. Some endpoints number them, and agents refuse that."""
    if dialect == "responses":
        output = [_with_text_ids(item) for item in answer["output"]]
        changed = {} if output == answer["output"] else {"output": output}
    else:
        choices = [_with_text_call_ids(choice) for choice in answer["choices"]]
        changed = {} if choices == answer["choices"] else {"choices": choices}
    fixed: Json = _with_text_ids(answer)
    return {**fixed, **changed} if changed else fixed


def _with_text_call_ids(choice: Any) -> Any:
    message = part_of(choice, "message")
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or (text_calls := [_with_text_ids(call) for call in calls]) == calls:
        return choice
    return {**choice, "message": {**message, "tool_calls": text_calls}}


def _with_text_ids(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    numbered = {
        name: str(part[name]) for name in ("id", "call_id") if isinstance(part.get(name), int | float)
    }
    return {**part, **numbered} if numbered else part


def overflow_answer(model: str | None) -> Json:
    """Make the chat answer to a request that exceeds the model's context, as NeMo Gym's vLLM model server does."""
    message = {"role": "assistant", "content": None}
    return {
        "id": new_id("chatcmpl"),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model or "",
        "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
    }


def with_call_ids(answer: Json) -> Json:
    """Return a chat answer whose message is an assistant's and has an id on every call; the same object if it is so."""
    choice, message = answer["choices"][0], answer["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    if all(call.get("id") for call in calls) and message.get("role") == "assistant":
        return answer
    calls_with_ids = [call if call.get("id") else {**call, "id": new_id("call")} for call in calls]
    fixed = {**message, "role": "assistant", **({"tool_calls": calls_with_ids} if calls_with_ids else {})}
    return {**answer, "choices": [{**choice, "message": fixed}, *answer["choices"][1:]]}


def read_content(answer: Json) -> AnswerContent:
    """Read a checked chat answer as Gym's server does: it puts reasoning into `<think>` tags in the text, then reads all tags."""
    choice = answer["choices"][0]
    message = choice["message"]
    content = message.get("content")
    text = content if isinstance(content, str) else joined_text(content or [])
    reasoning, style = message_reasoning(message)
    thoughts, text = split_think_tags(f"<think>{reasoning}</think>{text}" if reasoning else text)
    if thoughts and not reasoning:
        style = THINK_TAGS
    calls = message.get("tool_calls") or []
    finish = str(choice.get("finish_reason") or ("tool_calls" if calls else "stop"))
    return AnswerContent(thoughts, style, text, str(message.get("refusal") or ""), calls, finish)


def chat_answer_to_responses(answer: Json, content: AnswerContent, usage: Usage, request: Json) -> Json:
    """Make the Responses object for a checked chat answer to `request` (the agent's Responses request)."""
    choice, reason = answer["choices"][0], _INCOMPLETE.get(content.finish_reason)
    logprobs = _output_logprobs(choice.get("logprobs")) if wants_logprobs(request) else None
    status = "incomplete" if reason else "completed"
    # Where a service stands between, what the model itself said; NeMo Gym has it in the same place.
    native = choice.get("native_finish_reason")
    return {
        **response_object(_output(content, logprobs, status), request),
        **({} if native is None else {"native_finish_reason": str(native)}),
        # An integer: verifiers and others refuse a fraction.
        "created_at": _seconds(answer.get("created")),
        "status": status,
        "incomplete_details": {"reason": reason} if reason else None,
        "completed_at": None if reason else int(time.time()),
        "model": answer.get("model") or request.get("model") or "",
        "usage": usage_for_responses(usage, answer.get("usage")),
    }


def response_object(output: list[Json], request: Mapping[str, Any]) -> Json:
    """Make a completed Responses object with every field that the Open Responses specification requires.

    The request's parameters are among them, with every field that the specification requires in tools and formats.
    """
    reasoning, text = request.get("reasoning"), request.get("text") or {}
    shape = text.get("format") or {"type": "text"}
    if shape.get("type") == "json_schema":
        shape = {"description": None, "strict": False, **shape}
    in_tool = {"description": None, "parameters": None, "strict": None}
    return {
        **_DEFAULTS,
        **{name: request[name] for name in _ECHOED if request.get(name) is not None},
        "id": new_id("resp"),
        "object": "response",
        "created_at": 0,
        "completed_at": None,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "metadata": request.get("metadata") or {},
        "output": output,
        "reasoning": {"effort": None, "summary": None, **reasoning} if reasoning else None,
        "text": {**text, "format": shape},
        "tools": [
            {**in_tool, **tool} if tool.get("type") == "function" else tool
            for tool in request.get("tools") or []
        ],
        "usage": None,
    }


def _seconds(moment: Any) -> int:
    return int(moment if isinstance(moment, int | float) and 0 <= moment < _LAST_SECOND else time.time())


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _output(content: AnswerContent, logprobs: list[Json] | None, status: str) -> list[Json]:
    """Items for reasoning, message and calls; an empty answer is an empty message, and only that, as in Gym's server.

    A message after mere reasoning would be scored as the answer, and nemo-gym 0.7's agent would not see `incomplete_reasoning`.
    """
    items: list[Json] = []
    if content.reasoning:
        summary = [{"type": "summary_text", "text": thought} for thought in content.reasoning]
        items.append({"id": new_id("rs"), "type": "reasoning", "summary": summary})
    if content.text or content.refusal or not (content.reasoning or content.tool_calls):
        items.append(_message_item(content, logprobs, status))
    return [*items, *map(_call_item, content.tool_calls)]


def _message_item(content: AnswerContent, logprobs: list[Json] | None, status: str) -> Json:
    parts: list[Json] = []
    if content.text or not content.refusal:
        text: Json = {"type": "output_text", "text": content.text, "annotations": []}
        parts.append(text if logprobs is None else {**text, "logprobs": logprobs})
    if content.refusal:
        parts.append({"type": "refusal", "refusal": content.refusal})
    return {"id": new_id("msg"), "type": "message", "role": "assistant", "status": status, "content": parts}


def _call_item(call: Json) -> Json:
    name, arguments = call_of(call)
    if call.get("custom") is not None:
        item: Json = {"id": new_id("ctc"), "type": "custom_tool_call"}
        return {**item, "call_id": call["id"], "name": name, "input": arguments}
    item = {"id": new_id("fc"), "type": "function_call"}
    return {**item, "call_id": call["id"], "name": name, "arguments": arguments, "status": "completed"}


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


def responses_answer_to_chat(answer: Json, usage: Usage, request: Json) -> Json:
    """Make the chat completion for a checked Responses answer to `request` (the agent's chat request)."""
    logprobs = _chat_logprobs(answer["output"]) if request.get("logprobs") else None
    completion: Json = {
        "id": str(answer.get("id") or new_id("chatcmpl")),
        "object": "chat.completion",
        "created": _seconds(answer.get("created_at")),
        "model": answer.get("model") or request.get("model") or "",
        "choices": [
            {
                "index": 0,
                "message": _chat_message(answer["output"]),
                "logprobs": logprobs,
                "finish_reason": finish_reason_of(answer, "responses"),
            }
        ],
        "usage": usage_for_chat(usage, answer.get("usage")),
    }
    if answer.get("service_tier") is not None:
        completion["service_tier"] = answer["service_tier"]
    return completion


def _chat_message(items: list[Json]) -> Json:
    content, refusal, reasoning = said_in(items)
    calls = [_chat_call(item) for item in items if item.get("type") in ("function_call", "custom_tool_call")]
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


def _chat_call(item: Json) -> Json:
    call_id, name = item.get("call_id"), item.get("name")
    if item.get("type") == "custom_tool_call":
        custom = {"name": name, "input": item.get("input") or ""}
        return {"id": call_id, "type": "custom", "custom": custom}
    if not (call_id and name):
        raise PolicyError(f"the endpoint's answer has a function call without call_id or name: {item!r:.200}")
    function = {"name": name, "arguments": as_text(_or(item.get("arguments"), "{}"))}
    return {"id": call_id, "type": "function", "function": function}


def _chat_logprobs(items: list[Json]) -> Json | None:
    messages = (item for item in items if item.get("type") == "message")
    parts = (part for item in messages for part in objects(item.get("content")))
    content = [entry for part in parts for entry in part.get("logprobs") or []]
    return {"content": content, "refusal": None} if content else None


def chat_answer_to_messages(answer: Json, content: AnswerContent, usage: Usage, request: Json) -> Json:
    """Make the Anthropic message for a checked chat answer to `request` (the agent's messages request)."""
    stopped_by = answer["choices"][0].get("stop_reason")  # vLLM: the stop string, or a token id
    sequence = stopped_by if stopped_by in (request.get("stop_sequences") or ()) else None
    if sequence:
        reason = "stop_sequence"
    elif content.tool_calls and content.finish_reason in ("stop", "tool_calls", "function_call"):
        reason = "tool_use"
    else:
        reason = "refusal" if content.refusal else _STOP_REASONS.get(content.finish_reason, "end_turn")
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": answer.get("model") or request.get("model") or "",
        "content": _blocks(content),
        "stop_reason": reason,
        "stop_sequence": sequence,
        **dict.fromkeys(MESSAGE_NULLS),
        "usage": usage_for_messages(usage),
    }


def _blocks(content: AnswerContent) -> list[Json]:
    """Blocks for thinking, text and calls; an empty answer is one empty text."""
    blocks: list[Json] = [
        {"type": "thinking", "thinking": text, "signature": _SIGNATURE} for text in content.reasoning
    ]
    if (text := content.text + content.refusal) or not (content.reasoning or content.tool_calls):
        blocks.append({"type": "text", "text": text, "citations": None})
    for call in content.tool_calls:
        name, arguments = call_of(call)
        block = {"type": "tool_use", "id": call["id"], "name": name, "input": _tool_input(arguments)}
        blocks.append({**block, "caller": {"type": "direct"}})
    return blocks


def _tool_input(arguments: str) -> Json:
    """Parse a call's arguments. Anthropic takes objects only: anything else goes under `arguments`, for the tool to refuse."""
    try:
        value = codec.loads_own(arguments.encode() or b"{}")
    except ValueError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": as_text(value)}
