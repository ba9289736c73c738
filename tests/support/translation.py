"""Answers translated as the gateway does it: checked by the backend first."""

from __future__ import annotations

from typing import Any

from gymgate.core.config import Dialect
from gymgate.core.errors import PolicyError
from gymgate.gateway.dialects import ConversationMemory, translate_answer
from gymgate.gateway.dialects.reading import fault_of


def checked_translation(
    answer: Any,
    request: dict[str, Any],
    source: Dialect,
    target: Dialect,
    memory: ConversationMemory | None = None,
) -> dict[str, Any]:
    """Return the translation of an answer that nobody has checked. Raises `PolicyError` for what is no answer."""
    if source != "messages" and (fault := fault_of(answer, source)) is not None:
        raise PolicyError(f"the endpoint {fault}")
    return translate_answer(answer, request, source, target, memory)
