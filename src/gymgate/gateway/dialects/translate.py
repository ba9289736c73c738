"""Requests, answers and errors from one dialect to another, and what the conversation's memory keeps of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gymgate.config import Dialect
from gymgate.errors import ConfigError, GymgateError, PolicyError
from gymgate.gateway.dialects.answers import (
    chat_answer_to_messages,
    chat_answer_to_responses,
    read_content,
    responses_answer_to_chat,
    with_call_ids,
)
from gymgate.gateway.dialects.chat_request import request_to_responses
from gymgate.gateway.dialects.memory import ConversationMemory, fingerprints_of_answer
from gymgate.gateway.dialects.messages_request import messages_to_chat
from gymgate.gateway.dialects.reading import Json, fault_of
from gymgate.gateway.dialects.responses_request import request_to_chat

_ERROR_KINDS = {401: "authentication_error", 404: "not_found_error"}
_ANTHROPIC_KINDS = {
    **_ERROR_KINDS,
    403: "permission_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def translate_request(
    body: Json, source: Dialect, target: Dialect, memory: ConversationMemory | None = None
) -> Json:
    """Translate an agent's request in `source` for an endpoint that speaks `target`.

    `body` is not changed, but the result may share parts with it. `stream` is left to the caller.
    `ConfigError` if the endpoint cannot do what the request asks; the message names it.
    """
    if source == target:
        return body
    with _errors(ConfigError, f"the {source} request is malformed"):
        return _translated_request(
            body, source, target, memory if memory is not None else ConversationMemory()
        )


def _translated_request(body: Json, source: Dialect, target: Dialect, memory: ConversationMemory) -> Json:
    if source == "responses" and target == "chat":
        return request_to_chat(body, memory)
    if source == "chat" and target == "responses":
        return request_to_responses(body, memory)
    if source == "messages" and target == "chat":
        return messages_to_chat(body, memory, "chat")
    if source == "messages" and target == "responses":
        return request_to_responses(messages_to_chat(body, memory, "responses"), memory)
    raise ConfigError(f"a {source} request cannot be sent to an endpoint that speaks {target}")


def translate_answer(
    answer: Json,
    request: Json,
    source: Dialect,
    target: Dialect,
    memory: ConversationMemory | None = None,
) -> Json:
    """Translate an endpoint's answer in `source` for the agent that sent `request` (in `target`).

    With a memory, the answer is remembered there, and comes back unchanged in that rollout's next requests.
    `PolicyError` if `answer` is not a valid answer, or says that the model failed.
    """
    with _errors(PolicyError, f"the endpoint's answer is malformed ({source})"):
        if source != "messages" and (fault := fault_of(answer, source)) is not None:
            raise PolicyError(f"the endpoint {fault}")
        if source == target:
            return answer
        checked = with_call_ids(answer) if source == "chat" else answer
        translated = _translated(checked, request, source, target)
        if memory is not None:
            _remember(checked, translated, source, target, memory)
        return translated


@contextmanager
def _errors(kind: type[GymgateError], what: str) -> Iterator[None]:
    """Turn the failure at a field of an unexpected type, wherever it is first used, into a typed error."""
    try:
        yield
    except GymgateError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error


def _translated(answer: Json, request: Json, source: Dialect, target: Dialect) -> Json:
    if source == "responses":
        chat = responses_answer_to_chat(answer, request if target == "chat" else {})
        return chat if target == "chat" else chat_answer_to_messages(chat, request)
    if source == "chat" and target == "responses":
        return chat_answer_to_responses(answer, request)
    if source == "chat" and target == "messages":
        return chat_answer_to_messages(answer, request)
    raise ConfigError(f"an endpoint that speaks {source} cannot answer a {target} request")


def _remember(
    answer: Json, translated: Json, source: Dialect, target: Dialect, memory: ConversationMemory
) -> None:
    if source == "chat":
        if (style := read_content(answer).style) is not None:
            memory.learn_reasoning_style(style)
        originals = [answer["choices"][0]["message"]]
    else:
        originals = answer["output"]
    memory.record(target, source, fingerprints_of_answer(translated, target), originals)


def error_body(dialect: Dialect, status: int, message: str) -> Json:
    """Make the body of an error answer, of the type that the dialect's API has for the status."""
    kind = "invalid_request_error" if status < 500 else "api_error"
    if dialect == "messages":
        return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(status, kind), "message": message}}
    kind = _ERROR_KINDS.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
