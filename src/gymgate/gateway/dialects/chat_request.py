"""A chat-completions request as a Responses request."""

from __future__ import annotations

import functools
from typing import Any

from gymgate.core.errors import ConfigError
from gymgate.gateway.dialects.content import assistant_parts, content_to_responses, message_reasoning
from gymgate.gateway.dialects.memory import ConversationMemory, Original, message_fingerprint
from gymgate.gateway.dialects.reading import Json, field, mappings, stable_id
from gymgate.gateway.dialects.tools import choice_to_responses, format_to_responses, tool_to_responses
from gymgate.rollouts.history import translated

_HANDLED = {
    *("max_tokens", "max_completion_tokens", "reasoning_effort", "response_format", "verbosity", "logprobs"),
    *("messages", "tools", "tool_choice", "top_logprobs", "stream_options"),
}
_DEFAULTS = {"n": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}, "modalities": ["text"]}
"""Default values, which are left out: a Responses endpoint may not know the field."""
NOT_TRANSLATED = ("function_call", "audio")
"""Fields of an assistant's message that are refused."""


def request_to_responses(body: Json, memory: ConversationMemory) -> Json:
    """Translate to a Responses request; unknown fields (`seed`, `stop`, engine parameters) are kept.

    OpenAI's own endpoint refuses fields that it does not know, which is better than a silent change of sampling.
    """
    shared = {
        name: value
        for name, value in body.items()
        if value is not None and name not in _HANDLED and _DEFAULTS.get(name) != value
    }
    if shared.get("n") is not None:
        raise ConfigError(
            f"n={body['n']!r}: a Responses endpoint gives one answer; send the request {body['n']} times"
        )
    messages = field(body, "messages", "the chat request")
    items = translated(messages, "responses", functools.partial(_items, messages, memory))
    return {**shared, "input": items, **_settings(body), **_tools(body)}


def _settings(body: Json) -> Json:
    settings: Json = {}
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None:
            settings["max_output_tokens"] = body[name]
    if body.get("reasoning_effort") is not None:
        settings["reasoning"] = {"effort": body["reasoning_effort"]}
    if text := format_to_responses(body.get("response_format"), body.get("verbosity")):
        settings["text"] = text
    if body.get("logprobs"):
        settings["include"] = ["message.output_text.logprobs"]
        if body.get("top_logprobs") is not None:
            settings["top_logprobs"] = body["top_logprobs"]
    return settings


def _tools(body: Json) -> Json:
    fields: Json = {}
    if tools := [tool_to_responses(tool) for tool in mappings(body.get("tools") or [], "tools")]:
        fields["tools"] = tools
    if body.get("tool_choice") is not None:
        fields["tool_choice"] = choice_to_responses(body["tool_choice"])
    return fields


def _items(messages: Any, memory: ConversationMemory, first: int, stop: int) -> list[Json]:
    """Translate the messages from number `first` to `stop`."""
    new = mappings(messages, "messages", first, stop)
    custom_calls = _custom_call_ids(new, messages[:first])
    items: list[Json] = []
    for at, message in enumerate(new, first):
        role = message.get("role")
        if isinstance(message, Original):
            items.append(message)
        elif role == "assistant":
            # As the endpoint gave it, with its reasoning: so the prompt extends the one before.
            run = memory.match("chat", "responses", [message_fingerprint(message)], 0, messages, at)
            items.extend(run.originals if run is not None else assistant_items(message))
        elif role == "tool":
            items.append(_tool_output(message, custom_calls))
        elif role in ("user", "system", "developer"):
            content = content_to_responses(message.get("content"), f"a {role} message")
            items.append({"type": "message", "role": role, "content": content})
        else:
            raise ConfigError(
                f"message with role {role!r}; roles are system, developer, user, assistant, tool"
            )
    return items


def _custom_call_ids(messages: list[Json], before: list[Json]) -> set[Any]:
    """Return the ids of custom tools' calls in messages, and in those `before` if an output belongs to a call there."""
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    custom = {call.get("id") for call in calls if call.get("custom") is not None} | {
        message.get("call_id") for message in messages if message.get("type") == "custom_tool_call"
    }
    answered = {message.get("tool_call_id") for message in messages if message.get("role") == "tool"}
    is_whole = not before or answered <= {call.get("id") for call in calls}
    return custom if is_whole else custom | _custom_call_ids(before, [])


def assistant_items(message: Json) -> list[Json]:
    """Return the Responses items of an assistant's chat message: reasoning, message, calls."""
    for name in NOT_TRANSLATED:
        if message.get(name):
            raise ConfigError(
                f"an assistant message with {name}; send content, tool_calls or function_call items"
            )
    items: list[Json] = []
    reasoning, _ = message_reasoning(message)
    if reasoning:
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": stable_id("rs", reasoning), "summary": summary})
    calls = message.get("tool_calls") or []
    content, refusal = message.get("content"), message.get("refusal")
    if content or refusal or not (calls or reasoning):
        items.append(_assistant_message(content, refusal))
    return [*items, *map(_call_item, calls)]


def _assistant_message(content: Any, refusal: Any) -> Json:
    if refusal is None and not isinstance(content, list):
        return {"type": "message", "role": "assistant", "content": content or ""}
    content_parts = (
        content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []
    )
    parts = [_assistant_part(part) for part in assistant_parts(content_parts)]
    if refusal:
        parts.append({"type": "refusal", "refusal": refusal})
    item_id = stable_id("msg", *(part.get("text") or part.get("refusal") or "" for part in parts))
    return {"type": "message", "role": "assistant", "id": item_id, "status": "completed", "content": parts}


def _assistant_part(part: Json) -> Json:
    if part.get("type") == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal") or ""}
    return {"type": "output_text", "text": part.get("text") or "", "annotations": []}


def _call_item(call: Json) -> Json:
    call_id = field(call, "id", "a tool call")
    custom = call.get("custom")
    if custom is not None:
        text = custom.get("input") or ""
        return {"type": "custom_tool_call", "call_id": call_id, "name": custom["name"], "input": text}
    function = field(call, "function", "a tool call")
    arguments = function.get("arguments")
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": field(function, "name", "a tool call's function"),
        "arguments": "{}" if arguments is None else arguments,
    }


def _tool_output(message: Json, custom_calls: set[Any]) -> Json:
    call_id = field(message, "tool_call_id", "a tool message")
    kind = "custom_tool_call_output" if call_id in custom_calls else "function_call_output"
    return {
        "type": kind,
        "call_id": call_id,
        "output": content_to_responses(message.get("content"), "a tool message"),
    }
