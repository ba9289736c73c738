"""Requests, answers and errors from one dialect to another, and what the conversation's memory keeps of them."""

from __future__ import annotations

from gymgate.core.config import Dialect
from gymgate.core.errors import ConfigError, GymgateError, PolicyError
from gymgate.gateway.dialects.answers import (
    chat_answer_to_messages,
    chat_answer_to_responses,
    read_content,
    responses_answer_to_chat,
    with_call_ids,
)
from gymgate.gateway.dialects.chat_request import request_to_responses
from gymgate.gateway.dialects.memory import ConversationMemory, fingerprints_of_answer, heard_before
from gymgate.gateway.dialects.messages_request import messages_to_chat
from gymgate.gateway.dialects.reading import Json
from gymgate.gateway.dialects.responses_request import request_to_chat
from gymgate.gateway.dialects.usage import usage_of, with_usage_details
from gymgate.rollouts.record import Usage
from gymgate.rollouts.row import input_items

_ERROR_KINDS = {401: "authentication_error", 404: "not_found_error"}
_ANTHROPIC_KINDS = {
    **_ERROR_KINDS,
    403: "permission_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_UNEXPECTED = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""What a field of an unexpected type raises where it is first used."""


def translate_request(
    body: Json, source: Dialect, target: Dialect, memory: ConversationMemory | None = None
) -> Json:
    """Translate an agent's request in `source` for an endpoint that speaks `target`.

    `body` is not changed, but the result may share parts with it. `stream` is left to the caller.
    `ConfigError` if the endpoint cannot do what the request asks; the message names it.
    """
    if source == target:
        return body
    memory = memory if memory is not None else ConversationMemory()
    try:
        if source == "responses" and target == "chat":
            return request_to_chat(body, memory)
        if source == "chat" and target == "responses":
            return request_to_responses(body, memory)
        if source == "messages" and target == "chat":
            return messages_to_chat(body, memory, "chat")
        if source == "messages" and target == "responses":
            return request_to_responses(messages_to_chat(body, memory, "responses"), memory)
    except GymgateError:
        raise
    except _UNEXPECTED as error:
        raise ConfigError(f"the {source} request is malformed: {type(error).__name__}: {error}") from error
    raise ConfigError(f"a {source} request cannot be sent to an endpoint that speaks {target}")


def translate_answer(
    answer: Json,
    request: Json,
    source: Dialect,
    target: Dialect,
    memory: ConversationMemory | None = None,
    *,
    usage: Usage | None = None,
) -> Json:
    """Translate an endpoint's answer in `source`, checked by `fault_of`, for the agent that sent `request` (in `target`).

    With a memory, the answer is remembered there, and comes back unchanged in that rollout's next requests. `usage` is
    the answer's, if it was read already. `PolicyError` if a field of `answer` is not what it should be.
    """
    usage = usage if usage is not None else usage_of(answer, source)
    if source == target:
        return with_usage_details(answer, usage) if source == "responses" else answer
    try:
        if source == "chat":
            answer = with_call_ids(answer)
            content, originals = read_content(answer), [answer["choices"][0]["message"]]
            if memory is not None and content.style is not None:
                memory.learn_reasoning_style(content.style)
            make = chat_answer_to_responses if target == "responses" else chat_answer_to_messages
            translated = make(answer, content, usage, request)
        elif source == "responses":
            originals = answer["output"]
            translated = responses_answer_to_chat(answer, usage, request if target == "chat" else {})
            if target == "messages":
                content = read_content(translated)
                translated = chat_answer_to_messages(translated, content, usage, request)
        else:
            raise ConfigError(f"an endpoint that speaks {source} cannot answer a {target} request")
        if memory is not None:
            items = input_items(request) if target == "responses" else request.get("messages") or []
            heard = heard_before(items, len(items))
            memory.record(target, source, fingerprints_of_answer(translated, target), originals, heard)
            if target == "responses":
                memory.keep_items(translated["output"])
    except GymgateError:
        raise
    except _UNEXPECTED as error:
        message = f"the endpoint's answer is malformed ({source}): {type(error).__name__}: {error}"
        raise PolicyError(message) from error
    return translated


def error_body(
    dialect: Dialect, status: int, message: str, *, code: str | None = None, param: str | None = None
) -> Json:
    """Make the body of an error answer, of the type that the dialect's API has for the status.

    Anthropic's has no `code` and `param`.
    """
    kind = "invalid_request_error" if status < 500 else "api_error"
    if dialect == "messages":
        return {"type": "error", "error": {"type": _ANTHROPIC_KINDS.get(status, kind), "message": message}}
    kind = _ERROR_KINDS.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
