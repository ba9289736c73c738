"""Tools, tool_choice and output formats: flat in Responses, nested in chat-completions."""

from __future__ import annotations

from typing import Any

from gymgate.core.errors import ConfigError
from gymgate.gateway.dialects.reading import Json, field, without, without_none

_KINDS = ("function", "custom")


def tool_to_chat(tool: Json) -> Json:
    """Translate a tool to chat. `ConfigError` names the type of one that only a Responses endpoint has."""
    kind = tool.get("type")
    if kind not in _KINDS:
        raise ConfigError(
            f"tool of type {kind!r} runs inside a Responses endpoint and has no chat-completions form; "
            "use function tools, or an endpoint with dialect='responses'"
        )
    inner = without(tool, "type")
    if kind == "function":
        inner = {**without(inner, "defer_loading", kind), **(tool.get(kind) or {})}
    elif (grammar := tool.get("format")) and grammar.get("type") == "grammar":
        inner["format"] = {"type": "grammar", "grammar": without(grammar, "type")}
    return {"type": kind, kind: without_none(inner)}


def tool_to_responses(tool: Json) -> Json:
    """Translate a tool for a Responses endpoint, which requires `parameters` and `strict`."""
    kind = tool.get("type", "function")
    if kind not in _KINDS:
        raise ConfigError(f"tool of type {kind!r} is unknown; chat-completions has function and custom tools")
    inner = dict(field(tool, kind, f"a tool of type {kind!r}"))
    if kind == "function":
        return {"type": "function", "parameters": None, "strict": None, **inner}
    if (grammar := inner.get("format")) and grammar.get("type") == "grammar":
        inner["format"] = {"type": "grammar", **grammar.get("grammar", {})}
    return {"type": "custom", **inner}


def choice_to_chat(choice: Any) -> Any:
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind in _KINDS:
        name = choice.get("name") or (choice.get(kind) or {}).get("name")
        return {"type": kind, kind: {"name": name}}
    if kind == "allowed_tools":
        allowed = [choice_to_chat(tool) for tool in choice.get("tools") or []]
        return {"type": kind, kind: {"mode": choice.get("mode", "auto"), "tools": allowed}}
    raise ConfigError(f"tool_choice of type {kind!r} has no chat-completions form")


def choice_to_responses(choice: Any) -> Any:
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind in _KINDS:
        return {"type": kind, **(choice.get(kind) or {})}
    if kind == "allowed_tools":
        allowed = choice.get(kind) or {}
        tools = [choice_to_responses(tool) for tool in allowed.get("tools") or []]
        return {"type": kind, "mode": allowed.get("mode", "auto"), "tools": tools}
    raise ConfigError(f"tool_choice of type {kind!r} has no Responses form")


def format_to_chat(text: Json) -> Json:
    """Translate the Responses field `text` to the chat fields `response_format` and `verbosity`."""
    fields: Json = {}
    shape = text.get("format") or {}
    kind = shape.get("type")
    if kind == "json_schema":
        fields["response_format"] = {"type": kind, "json_schema": without_none(without(shape, "type"))}
    elif kind == "json_object":
        fields["response_format"] = {"type": kind}
    elif kind not in (None, "text"):
        raise ConfigError(f"text.format of type {kind!r} has no chat-completions form")
    if text.get("verbosity") is not None:
        fields["verbosity"] = text["verbosity"]
    return fields


def format_to_responses(response_format: Json | None, verbosity: str | None) -> Json:
    """Make the Responses field `text`; empty if neither is given."""
    text: Json = {}
    if response_format is not None:
        kind = response_format.get("type")
        if kind == "json_schema":
            text["format"] = {"type": kind, **response_format.get("json_schema", {})}
        elif kind in ("json_object", "text"):
            text["format"] = {"type": kind}
        else:
            raise ConfigError(f"response_format of type {kind!r} has no Responses form")
    if verbosity is not None:
        text["verbosity"] = verbosity
    return text
