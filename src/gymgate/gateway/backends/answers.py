"""Is this an answer? And if not, what one line says why. Shared by the backends."""

from __future__ import annotations

from typing import Any

from gymgate import codec
from gymgate.config import Dialect

_LONGEST = 300


def fault_of(body: Any, dialect: Dialect) -> str | None:
    """What is wrong with `body` as an answer in `dialect`; `None` if it is one.

    An answer without text and without tool calls is one: models do give it, and agents know what to do with it.
    """
    if not isinstance(body, dict):
        return f"answered a JSON {type(body).__name__} where an object was expected"
    if body.get("error"):
        return f"answered with an error: {error_text(body)}"
    if dialect == "chat":
        return _fault_of_chat(body)
    if dialect == "responses":
        return _fault_of_response(body)
    return None if isinstance(body.get("content"), list) else "answered without 'content'"


def _fault_of_chat(body: dict[str, Any]) -> str | None:
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        return f"answered without 'choices' (it has {', '.join(body) or 'nothing'})"
    message = choices[0].get("message") if isinstance(choices[0], dict) else None
    return None if isinstance(message, dict) else "answered with a choice without 'message'"


def _fault_of_response(body: dict[str, Any]) -> str | None:
    if body.get("status") == "failed":
        return "answered with status 'failed' and no reason"
    if not isinstance(body.get("output"), list):
        return f"answered without 'output' (it has {', '.join(body) or 'nothing'})"
    return None


def error_text(body: Any) -> str:
    """The message in an error body, whichever way its server nests it, on one short line."""
    found = _message(body)
    return shortened(found if found is not None else codec.dumps(body).decode(errors="replace"))


def _message(body: Any) -> str | None:
    if isinstance(body, str):
        return body
    if not isinstance(body, dict):
        return None
    for name in ("error", "message", "detail"):
        if (text := _message(body.get(name))) is not None:
            return text
    return None


def shortened(text: str, longest: int = _LONGEST) -> str:
    """On one line of at most `longest` characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 3] + "..."
