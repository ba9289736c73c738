"""An Anthropic messages request as a chat-completions request, which is also the first step to a Responses request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymgate.core import codec
from gymgate.core.config import Dialect
from gymgate.core.errors import ConfigError
from gymgate.gateway.dialects.content import set_reasoning
from gymgate.gateway.dialects.memory import ConversationMemory, block_fingerprint
from gymgate.gateway.dialects.reading import Json, field, joined_text, mappings, metadata_of, without_none
from gymgate.rollouts.history import translated

_HANDLED = (
    {"messages", "system", "tools", "tool_choice", "stop_sequences", "thinking", "output_config", "metadata"}
    # Hints for Anthropic's own service.
    | {"service_tier", "inference_geo", "context_management", "cache_control", "betas", "anthropic_beta"}
    | {"anthropic_version", "speed", "container", "mcp_servers"}
)
MOVED_MARKS = 4
"""Messages at a request's end that the next request may have in another form: with other marks for the cache."""
_MAX_USER = 64
"""Limit in characters; OpenAI refuses a longer `user`."""


def messages_to_chat(body: Json, memory: ConversationMemory, endpoint: Dialect) -> Json:
    """Translate to a chat request; `endpoint` is the dialect whose originals are taken from the memory.

    `ConfigError` for tools and content that only Anthropic's service has.
    """
    for name in ("mcp_servers", "container"):
        if body.get(name):
            raise ConfigError(f"{name} runs inside Anthropic's service and has no chat-completions form")
    shared = {name: value for name, value in body.items() if value is not None and name not in _HANDLED}

    messages = field(body, "messages", "the messages request")

    def translate(first: int, stop: int) -> list[Json]:
        history = _history(messages, first, stop, memory, endpoint)
        return history if first else [*_system(body.get("system")), *history]

    form = (endpoint, codec.dumps(body.get("system")))
    settled: Callable[[Json], bool] = lambda last: last.get("role") == "user"  # noqa: E731
    history = translated(messages, form, translate, settled, revised=MOVED_MARKS)
    return {**shared, "messages": history, **_settings(body), **_tools(body, endpoint)}


def _system(system: Any) -> list[Json]:
    if not system:
        return []
    return [{"role": "system", "content": _content(system, "system")}]


def _settings(body: Json) -> Json:
    settings: Json = {}
    if body.get("stop_sequences"):
        settings["stop"] = body["stop_sequences"]
    user = metadata_of(body).get("user_id")
    if isinstance(user, str) and len(user) <= _MAX_USER:
        settings["user"] = user
    output = body.get("output_config") or {}
    if (effort := output.get("effort")) is not None:
        settings["reasoning_effort"] = "xhigh" if effort == "max" else effort
    shape = output.get("format") or {}
    if shape.get("type") == "json_schema":
        schema = {"name": "output", "schema": shape.get("schema"), "strict": True}
        settings["response_format"] = {"type": "json_schema", "json_schema": schema}
    return settings


def _tools(body: Json, endpoint: Dialect) -> Json:
    tools = [_tool(tool, endpoint) for tool in mappings(body.get("tools") or [], "tools")]
    if not tools:
        return {}
    fields: Json = {"tools": tools}
    choice = body.get("tool_choice") or {}
    if choice:
        fields["tool_choice"] = _choice(choice)
    if choice.get("disable_parallel_tool_use") is not None:
        fields["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]
    return fields


def _tool(tool: Json, endpoint: Dialect) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise ConfigError(
            f"tool of type {tool['type']!r} is Anthropic's own and has no chat-completions form; use custom tools"
        )
    function = {
        "name": field(tool, "name", "a tool"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        # Anthropic's default is off; a Responses endpoint's own default is on. NeMo Gym says so too.
        "strict": tool.get("strict", False if endpoint == "responses" else None),
    }
    return {"type": "function", "function": without_none(function)}


def _choice(choice: Json) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind in ("auto", "none"):
        return kind
    if kind == "any":
        return "required"
    raise ConfigError(f"tool_choice of type {kind!r}; types are auto, any, tool, none")


def _history(
    messages: Any, first: int, stop: int, memory: ConversationMemory, endpoint: Dialect
) -> list[Json]:
    """Translate the messages from number `first` to `stop`.

    Blocks of consecutive assistant messages are one turn, however an agent cuts them.
    """
    history: list[Json] = []
    turn: list[Json] = []
    for at, message in enumerate(mappings(messages, "messages", first, stop), first):
        role = message.get("role")
        if role == "assistant":
            turn += _blocks(message)
            continue
        history += _assistant_messages(turn, memory, endpoint, messages, at)
        turn = []
        if role == "user":
            history += _user_messages(_blocks(message))
        elif role == "system":
            history += _system(message.get("content"))
        else:
            raise ConfigError(f"message with role {role!r}; roles are user, assistant, system")
    return history + _assistant_messages(turn, memory, endpoint, messages, stop)


def _assistant_messages(
    blocks: list[Json], memory: ConversationMemory, endpoint: Dialect, messages: Any, stop: int
) -> list[Json]:
    """Translate the blocks of the turn before message number `stop`; the endpoint's earlier answers come back as it gave them."""
    fingerprints = [block_fingerprint(block) for block in blocks]
    translations: list[Json] = []
    unknown: list[Json] = []

    def flush() -> None:
        if unknown:
            style = memory.reasoning_style if endpoint == "chat" else ("reasoning_content",)
            translations.append(_assistant_message(unknown, style))
            unknown.clear()

    at = 0
    while at < len(blocks):
        run = memory.match("messages", endpoint, fingerprints, at, messages, stop)
        if run is None:
            unknown.append(blocks[at])
            at += 1
            continue
        flush()
        translations += run.originals
        at += len(run.contents)
    flush()
    return translations


def _blocks(message: Json) -> list[Json]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return mappings(content or [], f"content of the {message.get('role')} message")


def _assistant_message(blocks: list[Json], style: tuple[str, ...]) -> Json:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(block.get("text"))
        elif kind == "thinking":
            thoughts.append(block.get("thinking"))
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind != "redacted_thinking":  # encrypted for Anthropic only
            raise ConfigError(
                f"content block of type {kind!r} in an assistant message has no chat-completions form"
            )
    message: Json = {"role": "assistant", "content": joined_text(texts) or (None if calls else "")}
    if reasoning := joined_text(thoughts, "\n\n"):
        set_reasoning(message, reasoning, style)
    return {**message, "tool_calls": calls} if calls else message


def _call(block: Json) -> Json:
    function = {
        "name": field(block, "name", "a tool_use block"),
        "arguments": codec.dumps(block.get("input") or {}).decode(),
    }
    return {"id": field(block, "id", "a tool_use block"), "type": "function", "function": function}


def _user_messages(blocks: list[Json]) -> list[Json]:
    """Translate a user message. Tool results become messages of their own, before the user's text beside them."""
    results = [block for block in blocks if block.get("type") == "tool_result"]
    others = [block for block in blocks if block.get("type") != "tool_result"]
    messages = [
        {
            "role": "tool",
            "tool_call_id": field(block, "tool_use_id", "a tool_result block"),
            "content": _content(block.get("content"), "a tool_result"),
        }
        for block in results
    ]
    if others or not results:
        messages.append({"role": "user", "content": _content(others, "a user message")})
    return messages


def _content(content: Any, what: str) -> Any:
    """Translate blocks to chat content; a single text becomes a string."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part for block in mappings(content, f"content of {what}") for part in _parts(block, what)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts or ""


def _parts(block: Json, what: str) -> list[Json]:
    kind = block.get("type")
    if kind == "text":
        return [{"type": "text", "text": block.get("text") or ""}]
    if kind == "image":
        return [{"type": "image_url", "image_url": {"url": _source_url(block, what)}}]
    if kind == "document":
        return _document(block, what)
    raise ConfigError(f"content block of type {kind!r} in {what} has no chat-completions form")


def _document(block: Json, what: str) -> list[Json]:
    source = block.get("source") or {}
    if source.get("type") == "text":
        return [{"type": "text", "text": source.get("data") or ""}]
    if source.get("type") == "content":
        inner = source.get("content")
        blocks = [{"type": "text", "text": inner}] if isinstance(inner, str) else inner or []
        return [part for entry in blocks for part in _parts(entry, what)]
    if source.get("type") != "base64":
        raise ConfigError(
            f"document with a source of type {source.get('type')!r} in {what}; chat takes inline data"
        )
    file = {"filename": block.get("title") or "document.pdf", "file_data": _source_url(block, what)}
    return [{"type": "file", "file": file}]


def _source_url(block: Json, what: str) -> str:
    source = block.get("source") or {}
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    if source.get("type") == "url":
        return str(source.get("url"))
    raise ConfigError(
        f"{block.get('type')} with a source of type {source.get('type')!r} in {what} has no chat form"
    )
