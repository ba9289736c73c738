"""What a Responses object must have: for `openai`'s types, and by the Open Responses specification, in our own words."""

from __future__ import annotations

from typing import Any

from openai.types.responses import Response

from gymgate.gateway.dialects import translate_answer
from gymgate.gateway.replay.backend import make_response
from support.upstream import chat_answer

Json = dict[str, Any]

NEVER_NULL: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("id", "model", "object", "status", "service_tier", "truncation"), str),
    **dict.fromkeys(("background", "parallel_tool_calls", "store"), bool),
    **dict.fromkeys(("created_at", "top_logprobs"), int),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "temperature", "top_p"), (int, float)),
    **dict.fromkeys(("output", "tools"), list),
    **dict.fromkeys(("metadata", "text"), dict),
    "tool_choice": (str, dict),
}
"""Fields that are always there with a value, and the types of the value."""
NULLABLE = (
    *("completed_at", "error", "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls"),
    *("previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "usage"),
)
"""Fields that are always there, and may be null."""
TOOL = ("description", "name", "parameters", "strict", "type")
"""Fields of a function tool that the answer repeats."""
JSON_SCHEMA = ("description", "name", "schema", "strict", "type")
"""Fields of the format of a structured output that the answer repeats."""

SCHEMA: Json = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
REQUESTS: list[Json] = [
    {"input": "hi"},
    {"input": "hi", "model": "m", "temperature": 0.5, "store": True, "reasoning": {"effort": "low"}},
    {"input": "hi", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"},
    {
        "input": "hi",
        "text": {"format": SCHEMA, "verbosity": "low"},
        "instructions": "x",
        "metadata": {"a": "b"},
    },
]
CALL: Json = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[Json] = [
    {"role": "assistant", "content": "x"},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "x", "reasoning": "r", "tool_calls": [CALL]},
    {"role": "assistant", "content": None, "refusal": "no"},
]


def check_every_answer() -> None:
    """Check answers of a chat endpoint and of recorded rollouts to every request."""
    for request in REQUESTS:
        for message in MESSAGES:
            for finish, usage in (("stop", {"prompt_tokens": 3, "completion_tokens": 2}), ("length", None)):
                choice = {"index": 0, "message": message, "finish_reason": finish}
                given = chat_answer(choices=[choice], usage=usage)
                check(translate_answer(given, request, "chat", "responses"), request)
        check(make_response([{"role": "assistant", "content": "x"}], request, response_id="resp_1"), request)


def check(response: Json, request: Json) -> None:
    Response.model_validate(response)
    assert not [name for name, kind in NEVER_NULL.items() if not isinstance(response.get(name), kind)]
    assert not [name for name in NULLABLE if name not in response]
    assert all(set(TOOL) <= tool.keys() for tool in response["tools"])
    shape = response["text"]["format"]
    if shape["type"] == "json_schema":
        assert set(JSON_SCHEMA) <= shape.keys()
        assert isinstance(shape["strict"], bool)
    for name in ("temperature", "store", "instructions", "tool_choice", "metadata"):
        assert name not in request or response[name] == request[name]
