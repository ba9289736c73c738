"""A complete answer as the stream of server-sent events that its dialect's clients read."""

from __future__ import annotations

from collections.abc import Iterator

from gymgate.config import Dialect
from gymgate.errors import PolicyError
from gymgate.gateway.dialects._read import Json
from gymgate.gateway.dialects.sse_chat import chat_events
from gymgate.gateway.dialects.sse_messages import messages_events
from gymgate.gateway.dialects.sse_responses import responses_events


def encode_stream(answer: Json, dialect: Dialect, request: Json) -> Iterator[bytes]:
    """The events of `answer`, one after the other; `request` is the body that asked for the stream.

    Every text is one delta. Clients that accumulate the events get `answer` back. Raises `PolicyError`, at any event,
    if the answer is not one of the dialect.
    """
    try:
        if dialect == "chat":
            yield from chat_events(answer, request)
        else:
            yield from (responses_events if dialect == "responses" else messages_events)(answer)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = (
            f"endpoint's answer is no {dialect} answer that can be streamed: {type(error).__name__}: {error}"
        )
        raise PolicyError(message) from error
