"""Error envelopes: how each dialect's clients expect to be told that a call failed."""

from __future__ import annotations

from gymgate.config import Dialect
from gymgate.gateway.dialects._read import Json

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def error_body(dialect: Dialect, status: int, message: str, kind: str) -> Json:
    """The body of an error answer; `kind` is OpenAI's `type`, which Anthropic's replaces where it has its own."""
    if dialect == "messages":
        kind = _ANTHROPIC_KINDS.get(status, kind if kind.endswith("_error") else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
