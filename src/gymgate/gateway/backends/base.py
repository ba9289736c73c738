"""The interface of backends, which answer model calls, and the checks of their answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from gymgate import codec
from gymgate.config import Dialect

_LONGEST = 300


@dataclass(slots=True)
class BackendAnswer:
    """An endpoint's successful answer to one call, in the backend's own dialect."""

    body: dict[str, Any]
    raw: bytes | None = None
    """The answer's bytes as received, if they can be passed on unchanged."""
    retries: int = 0
    details: dict[str, Any] = field(default_factory=dict)
    """Further facts for the call's record (replica, matched recording, ...)."""

    def noted(self) -> dict[str, Any]:
        """The details, with the number of retries if there were any."""
        return {**self.details, "retries": self.retries} if self.retries else self.details


class Backend(Protocol):
    """Answers model calls in one dialect. One backend serves many rollouts at once.

    `call` raises `PolicyError` (with the upstream's status code, where it gave one) for every failure;
    cancelling it abandons the call.
    """

    @property
    def dialect(self) -> Dialect:
        """The dialect of its requests and answers."""
        ...

    async def call(self, body: dict[str, Any], *, raw: bytes | None = None) -> BackendAnswer:
        """Answer `body`, a request in `self.dialect`; `raw` is its serialised form, if already at hand."""
        ...

    async def close(self) -> None:
        """Release connections; calls in flight fail."""
        ...


def fault_of(body: Any, dialect: Dialect) -> str | None:
    """Say why `body` is not an answer in `dialect`; `None` if it is one.

    An answer without text and tool calls is valid: models do give it, and agents handle it.
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
    """Find the message in an error body, however its server nests it; return it on one short line."""
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
    """Return the text on one line of at most `longest` characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else line[: longest - 3] + "..."
