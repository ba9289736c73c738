"""Refuses chat-completions requests that a policy of token ids would answer wrongly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gymgate.errors import PolicyError

_GUIDED: Final = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""vLLM's names of constraints on what is sampled."""


def check_request(request: Mapping[str, Any], renderer: object) -> None:
    """Raise `PolicyError` for a field that would otherwise have no effect.

    Refused: several answers, content parts that are not text, a forced or forbidden tool call, constrained output, and chat
    template arguments that differ from the renderer's own.
    """
    if (request.get("n") or 1) != 1:
        raise _refused("n", request["n"], "it gives one answer per call")
    _check_messages(request["messages"])
    _check_format(request)
    _check_tool_choice(request)
    _check_template(request.get("chat_template_kwargs") or {}, renderer)


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    for number, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise _refused(f"messages[{number}].content", {"type": kind}, "it takes text only")


def _check_format(request: Mapping[str, Any]) -> None:
    wanted = request.get("response_format")
    if wanted and not (isinstance(wanted, Mapping) and wanted.get("type") == "text"):
        raise _refused("response_format", wanted, "its sampling is not constrained")
    for name in _GUIDED:
        if request.get(name):
            raise _refused(name, request[name], "its sampling is not constrained")


def _check_tool_choice(request: Mapping[str, Any]) -> None:
    choice = request.get("tool_choice")
    if choice in (None, "auto") or (choice == "none" and not request.get("tools")):
        return
    raise _refused("tool_choice", choice, "it chooses by itself whether to call a tool ('auto')")


def _check_template(wanted: Mapping[str, Any], renderer: object) -> None:
    config, unset = getattr(renderer, "config", None), object()
    for name, value in wanted.items():
        ours = getattr(config, name, unset)
        if value is not None and ours != value:
            said = "does not have it" if ours is unset else f"has {ours!r}"
            raise _refused(
                f"chat_template_kwargs.{name}",
                value,
                f"its renderer {said}; build the renderer with this value, or change the request",
            )


def _refused(name: str, value: object, why: str) -> PolicyError:
    return PolicyError(f"a policy of token ids cannot follow {name}={value!r:.200}: {why}", retryable=False)
