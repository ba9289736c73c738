"""What an answer in the Responses dialect must look like, as far as agents read it.

An agent that cannot read an answer fails, which would count as the environment's failure. Fields without which an answer
still says the same may be missing: servers differ in what they leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import (
    Any,
    Literal,
    Required,  # pydantic needs these before Python 3.12
)

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic refuses that of typing before Python 3.12

from gymgate.core import codec

_Id = str | int | float
"""A number becomes text before an agent sees it."""
_Status = Literal["in_progress", "completed", "incomplete"] | None


class _InputDetails(TypedDict, total=False):
    cached_tokens: int | None


class _OutputDetails(TypedDict, total=False):
    reasoning_tokens: int | None


class _Usage(TypedDict, total=False):
    input_tokens: int | None
    output_tokens: int | None
    total_tokens: int | None
    input_tokens_details: _InputDetails | None
    output_tokens_details: _OutputDetails | None


class _Response(TypedDict, total=False):
    id: _Id
    object: Literal["response"]
    created_at: float
    model: str
    parallel_tool_calls: bool
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any]
    tools: list[dict[str, Any]]
    usage: _Usage | None
    incomplete_details: dict[str, Any] | None
    metadata: dict[str, str] | None


class _Text(TypedDict, total=False):
    type: Required[Literal["output_text"]]
    text: Required[str]
    annotations: list[dict[str, Any]]
    logprobs: list[dict[str, Any]] | None


class _Refusal(TypedDict):
    type: Literal["refusal"]
    refusal: str


class _Thought(TypedDict, total=False):
    type: str
    text: Required[str]


class _Message(TypedDict, total=False):
    id: _Id
    role: Literal["assistant"]
    status: _Status
    content: Required[str | list[_Text | _Refusal]]


class _FunctionCall(TypedDict, total=False):
    id: _Id | None
    call_id: Required[_Id]
    name: Required[str]
    arguments: Required[str]
    status: _Status


class _Reasoning(TypedDict, total=False):
    id: _Id
    summary: list[_Thought]
    content: list[_Thought] | None
    encrypted_content: str | None


class _Other(TypedDict):
    type: str


_RESPONSE: TypeAdapter[Any] = TypeAdapter(_Response)
_OTHER: TypeAdapter[Any] = TypeAdapter(_Other)
_ITEMS: Mapping[str, TypeAdapter[Any]] = {
    "message": TypeAdapter(_Message),
    "function_call": TypeAdapter(_FunctionCall),
    "reasoning": TypeAdapter(_Reasoning),
}


def fault_of_response(answer: Mapping[str, Any]) -> str | None:
    """Say where an answer whose `output` is a list of objects breaks the schema, as in "answered with ..."."""
    if codec.holds_long_integer(answer):
        return "answered with an integer beyond 64 bits, which NeMo Gym's agents cannot pass on"
    parts = [("", answer, _RESPONSE)]
    for index, item in enumerate(answer["output"]):
        kind = item.get("type")
        adapter = _ITEMS.get(kind, _OTHER) if isinstance(kind, str) else _OTHER
        parts.append((f"output.{index}.", item, adapter))
    for where, part, adapter in parts:
        try:
            adapter.validate_python(part)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            return f"answered with {where}{place} that breaks the Responses schema: {first['input']!r:.80}"
    return None
