"""Chat-completions requests on their way into a renderer, and completions on their way out of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gymgate.core import codec
from gymgate.core.errors import PolicyError
from gymgate.tokens.engines.base import Sample

Message = dict[str, Any]

_GUIDED: Final = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's names of constraints on what is sampled."""
_TOOL_FIELDS: Final = ("name", "description", "parameters")


def check_request(request: Mapping[str, Any], renderer: object) -> None:
    """Raise `PolicyError` for a field that a policy of token ids would otherwise ignore.

    Refused: several answers, content parts that are not text, a forced or forbidden tool call, constrained output, and chat
    template arguments that differ from the renderer's own.
    """
    if (request.get("n") or 1) != 1:
        raise _refusal("n", request["n"], "it gives one answer per call")
    for number, message in enumerate(request["messages"]):
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise _refusal(f"messages[{number}].content", {"type": kind}, "it takes text only")
    shape = request.get("response_format")
    if shape and not (isinstance(shape, Mapping) and shape.get("type") == "text"):
        raise _refusal("response_format", shape, "its sampling is not constrained")
    for name in _GUIDED:
        if request.get(name):
            raise _refusal(name, request[name], "its sampling is not constrained")
    choice = request.get("tool_choice")
    if choice not in (None, "auto") and (choice != "none" or request.get("tools")):
        raise _refusal("tool_choice", choice, "it chooses by itself whether to call a tool ('auto')")
    _check_template(request.get("chat_template_kwargs") or {}, renderer)


def _check_template(settings: Mapping[str, Any], renderer: object) -> None:
    config, unset = getattr(renderer, "config", None), object()
    for name, value in settings.items():
        ours = getattr(config, name, unset)
        if value is not None and ours != value:
            state = "does not have it" if ours is unset else f"has {ours!r}"
            raise _refusal(
                f"chat_template_kwargs.{name}",
                value,
                f"its renderer {state}; build the renderer with this value, or change the request",
            )


def _refusal(name: str, value: object, why: str) -> PolicyError:
    return PolicyError(f"a policy of token ids cannot follow {name}={value!r:.200}: {why}", retryable=False)


def renderable(messages: Sequence[Message]) -> list[Message]:
    """Messages as the renderer wants them: each with one text as its content, developer as system.

    Text parts are joined as vLLM joins them for a chat template that takes texts: others would write a list's Python form.
    """
    return [_renderable(message) for message in messages]


def _renderable(message: Message) -> Message:
    out = {name: value for name, value in message.items() if value is not None}
    content = out.get("content") or ""
    out["content"] = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    if out["role"] == "developer":
        out["role"] = "system"
    return out


def tool_specs(tools: Iterable[Any] | None) -> list[Any] | None:
    """Return a request's `tools` with the fields, in the order, in which vLLM's chat endpoint gives them to a chat template.

    Templates write all of it into the prompt, so a model sees the same prompt in training as in an evaluation. `strict` is
    left out, as NeMo Gym's server for vLLM does.
    """
    if tools is None:
        return None
    functions = (tool.get("function", tool) for tool in tools)
    return [
        {
            "type": "function",
            "function": {name: function[name] for name in _TOOL_FIELDS if function.get(name) is not None},
        }
        for function in functions
    ]


def history_hashes(messages: Sequence[Message], tools: list[Any] | None) -> list[int]:
    """One hash for each prefix of `messages`, equal for equal prefixes under equal tools."""
    history, hashes = hash(codec.dumps(tools, sort_keys=True)), []
    for message in messages:
        history = history_hash(history, message)
        hashes.append(history)
    return hashes


def history_hash(history: int, message: Message) -> int:
    """The hash of a history that goes on with `message`."""
    fields = {name: value for name, value in message.items() if value not in (None, [], "")}
    return hash((history, codec.dumps(fields, sort_keys=True)))


def assistant_message(parsed: Any, name_call: str) -> Message:
    """A parsed completion as a chat message; malformed tool calls stay visible as text."""
    calls = [call for call in parsed.tool_calls or [] if _is_complete(call)]
    broken = [call.raw for call in parsed.tool_calls or [] if call not in calls]
    message: Message = {"role": "assistant", "content": "\n".join(filter(None, [parsed.content, *broken]))}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    if calls:
        message["tool_calls"] = chat_tool_calls(calls, name_call)
    return message


def chat_tool_calls(calls: Sequence[Any], name_call: str) -> list[Message]:
    """Parsed calls in a chat message's form; those without an id get one made of `name_call`."""
    return [
        {
            "id": call.id or f"call_{name_call}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": _arguments(call.arguments)},
        }
        for number, call in enumerate(calls)
    ]


def _is_complete(call: Any) -> bool:
    """Whether the call can be made.

    A call with an argument that its tool does not declare can: the tool answers it. XML formats report that as
    `invalid_json`, which is also what JSON formats report for a call without a name.
    """
    status = str(call.status)
    return bool(call.name) and (status == "ok" or (status == "invalid_json" and call.arguments is not None))


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value if value is not None else {})


def chat_answer(
    answer_id: str,
    request: Mapping[str, Any],
    message: Message,
    prompt_ids: list[int],
    sample: Sample,
    *,
    with_ids: bool,
) -> dict[str, Any]:
    """A chat completion; with ids, it carries them as vLLM's `return_token_ids` does."""
    finish = sample.finish_reason
    if finish == "stop" and message.get("tool_calls"):
        finish_reason = "tool_calls"
    else:
        finish_reason = "length" if finish in ("length", "abort") else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
    used = (len(prompt_ids), len(sample.token_ids))
    answer: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion",
        "created": 0,
        "model": request.get("model") or "policy",
        "choices": [choice],
        "usage": {"prompt_tokens": used[0], "completion_tokens": used[1], "total_tokens": sum(used)},
    }
    if with_ids:
        choice |= {"token_ids": list(sample.token_ids), "logprobs": _logprobs(sample)}
        answer["prompt_token_ids"] = prompt_ids
    return answer


def _logprobs(sample: Sample) -> dict[str, Any] | None:
    if sample.logprobs is None:
        return None
    pairs = zip(sample.token_ids, sample.logprobs, strict=True)
    return {"content": [{"token": f"token_id:{token}", "logprob": value} for token, value in pairs]}
