"""A Responses request as a chat-completions request."""

from __future__ import annotations

from itertools import accumulate, takewhile

from gymgate.core.errors import ConfigError
from gymgate.gateway.dialects.chat_request import NOT_TRANSLATED, assistant_items
from gymgate.gateway.dialects.content import (
    assistant_parts,
    content_to_chat,
    said_in,
    set_reasoning,
    text_and_refusal,
)
from gymgate.gateway.dialects.gym_metadata import apply_gym_metadata
from gymgate.gateway.dialects.memory import ConversationMemory, item_fingerprint
from gymgate.gateway.dialects.reading import Json, as_text, field, mappings
from gymgate.gateway.dialects.tools import choice_to_chat, format_to_chat, tool_to_chat
from gymgate.rollouts.history import translated

_ASSISTANT_KINDS = ("reasoning", "function_call", "custom_tool_call")
_OUTPUT_KINDS = ("function_call_output", "custom_tool_call_output")
_CHAT_FIELDS = (
    *("tool_calls", "refusal", "reasoning_content", "reasoning", "reasoning_details"),
    *NOT_TRANSLATED,
)
"""Fields that only an assistant's chat message has. NeMo Gym takes such messages as input."""
_INEXPRESSIBLE = {
    "previous_response_id": "send the whole conversation as input",
    "conversation": "send the whole conversation as input",
    "prompt": "send the prompt's text as instructions or input",
    "background": "send it without background",
    "context_management": "compaction needs an endpoint with dialect='responses'",
}
_DROPPED = {"include", "truncation", "max_tool_calls", "stream_options", *_INEXPRESSIBLE}
"""Hints, and bounds on tools that run inside a Responses endpoint."""
_HANDLED = {
    *("max_output_tokens", "reasoning", "text", "top_logprobs"),
    *("input", "instructions", "tools", "tool_choice", "parallel_tool_calls"),
}


def request_to_chat(body: Json, memory: ConversationMemory) -> Json:
    """Translate to a chat request; fields that both APIs share, and unknown ones, are kept as they are.

    `ConfigError` for what a chat-completions endpoint cannot do (stored conversations, built-in tools, ...).
    """
    for name, advice in _INEXPRESSIBLE.items():
        if body.get(name):
            raise ConfigError(
                f"{name}={body[name]!r} cannot be sent to a chat-completions endpoint, which keeps no state; {advice}"
            )
    shared = {
        name: value
        for name, value in body.items()
        if value is not None and name not in _HANDLED and name not in _DROPPED
    }
    chat = {**shared, "messages": _messages(body, memory), **_settings(body), **_tools(body)}
    return apply_gym_metadata(chat)


def _settings(body: Json) -> Json:
    settings: Json = format_to_chat(body.get("text") or {})
    if body.get("max_output_tokens") is not None:
        # As Gym's model server says it: every engine knows max_tokens, not all know max_completion_tokens.
        settings["max_tokens"] = body["max_output_tokens"]
    effort = (body.get("reasoning") or {}).get("effort")
    if effort is not None:
        settings["reasoning_effort"] = effort
    if wants_logprobs(body):
        settings["logprobs"] = True
        if body.get("top_logprobs") is not None:
            settings["top_logprobs"] = body["top_logprobs"]
    return settings


def wants_logprobs(body: Json) -> bool:
    """Whether a Responses request asks for logprobs."""
    return bool(body.get("top_logprobs")) or "message.output_text.logprobs" in (body.get("include") or ())


def _tools(body: Json) -> Json:
    """Translate the fields about tools. Without tools there are none: vLLM refuses tool_choice and OpenAI
    parallel_tool_calls then."""
    choice = body.get("tool_choice")
    tools = [tool_to_chat(tool) for tool in mappings(body.get("tools") or [], "tools")]
    if not tools:
        if choice not in (None, "auto", "none"):
            raise ConfigError(f"tool_choice={choice!r} needs tools, and the request has none")
        return {}
    fields: Json = {"tools": tools}
    if choice is not None:
        fields["tool_choice"] = choice_to_chat(choice)
    if body.get("parallel_tool_calls") is not None:
        fields["parallel_tool_calls"] = body["parallel_tool_calls"]
    return fields


def _messages(body: Json, memory: ConversationMemory) -> list[Json]:
    items = field(body, "input", "the Responses request")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    instructions = as_text(body["instructions"]) if body.get("instructions") else None

    def translate(first: int, stop: int) -> list[Json]:
        new = mappings(items, "input", first, stop)
        messages = items_to_messages(new, memory, items[max(0, first - 1) : first])
        if instructions is None or first:
            return messages
        # In one system message with those that begin the input, as NeMo Gym does: many chat templates refuse a second one.
        leading = list(takewhile(_is_system_text, messages))
        texts = [text_and_refusal(message["content"])[0] for message in leading]
        return [{"role": "system", "content": "\n\n".join([instructions, *texts])}, *messages[len(leading) :]]

    def ends_turn(item: Json) -> bool:
        """Whether the assistant's items before this one are a turn of its own, whatever follows."""
        return item.get("type") in _OUTPUT_KINDS or item.get("role") in ("user", "tool")

    return translated(items, ("chat", instructions), translate, ends_turn)


def _is_system_text(message: Json) -> bool:
    """Whether it holds only text. Any other stays a message of its own, so that nothing is lost."""
    content = message["content"]
    return message["role"] == "system" and (
        isinstance(content, str) or all(part["type"] == "text" for part in content)
    )


def items_to_messages(items: list[Json], memory: ConversationMemory, earlier: list[Json]) -> list[Json]:
    """Translate items that follow `earlier` ones to chat messages; an endpoint's earlier answers come back as it gave them.

    Some agents put each tool's output right after its call: a recorded answer is found across outputs too, and is put
    before them, as it was.
    """
    items = [part for item in items for part in _plain_items(item, memory)]
    asked = [*earlier, *items]
    spoken = [_is_assistant(item) for item in items]
    speech = [at for at, is_spoken in enumerate(spoken) if is_spoken]
    fingerprints = [item_fingerprint(items[at]) for at in speech]
    # An answer lies between two things that the user says: items of one such stretch have the same number here.
    users = [
        not is_spoken and item.get("type") not in _OUTPUT_KINDS
        for item, is_spoken in zip(items, spoken, strict=True)
    ]
    stretch = list(accumulate(map(int, users)))
    messages: list[Json] = []
    turn: list[Json] = []  # the assistant's message under way, as one answer of a chat model holds its items

    def flush() -> None:
        if turn:
            messages.append(_assistant_message(turn, memory))
            turn.clear()

    nth, covered = 0, 0  # assistant items seen, and how many of them a recorded answer has covered
    for item, is_spoken in zip(items, spoken, strict=True):
        if not is_spoken:
            flush()
            messages.append(_other_message(item))
            continue
        at = len(earlier) + speech[nth]
        run = memory.match("responses", "chat", fingerprints, nth, asked, at) if nth >= covered else None
        if run is not None and stretch[speech[nth]] == stretch[speech[nth + len(run.contents) - 1]]:
            flush()
            messages.extend(run.originals)
            covered = nth + len(run.contents)
        elif nth >= covered:
            # A second text, or reasoning after one, is a turn of its own, except after calls: their outputs must
            # follow the message that holds all of them.
            if turn and _kind(turn[-1]) == "message" and _kind(item) in ("message", "reasoning"):
                flush()
            turn.append(item)
        nth += 1
    flush()
    return messages


def _kind(item: Json) -> str:
    return str(item.get("type") or "message")


def _plain_items(item: Json, memory: ConversationMemory) -> list[Json]:
    """Resolve a reference to an item of an earlier answer, and split a message written as in chat-completions."""
    kind, role = item.get("type"), item.get("role")
    if kind == "item_reference" or ((kind, role) == (None, None) and item.get("id")):
        if (remembered := memory.item(item.get("id"))) is None:
            raise ConfigError(
                f"input item_reference {item.get('id')!r} is no item of this conversation's answers; send the item itself"
            )
        return [remembered]
    if kind not in (None, "message"):
        return [item]
    if role == "tool":
        call_id = field(item, "tool_call_id", "a tool message")
        return [{"type": "function_call_output", "call_id": call_id, "output": item.get("content")}]
    is_chat = role == "assistant" and any(item.get(name) for name in _CHAT_FIELDS)
    return assistant_items(item) if is_chat else [item]


def _is_assistant(item: Json) -> bool:
    return _kind(item) in _ASSISTANT_KINDS or (_kind(item) == "message" and item.get("role") == "assistant")


def _other_message(item: Json) -> Json:
    kind = _kind(item)
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise ConfigError(
                f"input message with role {role!r}; roles are user, assistant, system, developer, tool"
            )
        content = content_to_chat(item.get("content"), f"a {role} message")
        # Many chat templates refuse the role `developer`; chat endpoints that know it read `system` as the same.
        return {"role": "system" if role == "developer" else role, "content": content}
    if kind in _OUTPUT_KINDS:
        call_id = field(item, "call_id", f"a {kind} item")
        output = item.get("output")
        if isinstance(output, list) and all(isinstance(part, dict) and part.get("type") for part in output):
            output = content_to_chat(output, "a tool's output")
        else:
            output = "" if output is None else as_text(output)
        return {"role": "tool", "tool_call_id": call_id, "content": output}
    raise ConfigError(
        f"input item of type {kind!r} has no chat-completions form; use an endpoint with dialect='responses'"
    )


def _assistant_message(items: list[Json], memory: ConversationMemory) -> Json:
    for item in items:
        if _kind(item) == "message" and isinstance(item.get("content"), list):
            assistant_parts(item["content"])
    text, refusal, reasoning = said_in(items)
    calls = [_tool_call(item) for item in items if item.get("type") in ("function_call", "custom_tool_call")]
    has_text = any(_kind(item) == "message" for item in items)
    # Strict endpoints refuse null without calls.
    message: Json = {"role": "assistant", "content": text if has_text or not calls else None}
    if refusal:
        message["refusal"] = refusal
    if reasoning:
        set_reasoning(message, reasoning, memory.reasoning_style)
    return {**message, "tool_calls": calls} if calls else message


def _tool_call(item: Json) -> Json:
    kind, name = item["type"], field(item, "name", f"a {item['type']} item")
    if item.get("namespace"):
        raise ConfigError(
            f"call of {name!r} in namespace {item['namespace']!r}: chat-completions has no namespaces"
        )
    call_id = field(item, "call_id", f"a {kind} item")
    if kind == "custom_tool_call":
        return {"id": call_id, "type": "custom", "custom": {"name": name, "input": item.get("input") or ""}}
    arguments = as_text(item.get("arguments") if item.get("arguments") is not None else "{}")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
