"""The rows of the table in docs/agreement.md: an endpoint's answer, and the items that an agent gets for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Items = list[tuple[Any, ...]]


def call(**fields: Any) -> Json:
    function = {"name": "f", "arguments": fields.pop("arguments", "{}")}
    return {"id": "a", "type": "function", "function": function, **fields}


def text(value: str, status: str = "completed") -> tuple[Any, ...]:
    return ("message", status, ("output_text", value))


@dataclass(frozen=True)
class Row:
    """An answer of a chat endpoint. `nemo_gym` has what differs from `items`, by release; `None` is HTTP 500."""

    message: Json
    items: Items
    nemo_gym: dict[str, Items | None] = field(default_factory=dict)
    finish: str = "stop"
    status: str = "completed"

    @property
    def choice(self) -> Json:
        return {"index": 0, "message": {"role": "assistant", **self.message}, "finish_reason": self.finish}


def in_both(items: Items | None) -> dict[str, Items | None]:
    return {"0.6.0": items, "0.7.0": items}


CALL = ("function_call", "a", "f", "{}")
ROWS = {
    "only reasoning": Row({"content": None, "reasoning_content": "r"}, [("reasoning", "r")]),
    "only reasoning, cut": Row(
        {"content": "", "reasoning": "r"}, [("reasoning", "r")], finish="length", status="incomplete"
    ),
    "only empty `<think>` tags": Row({"content": "<think></think>"}, [("reasoning", "")]),
    "nothing": Row({"content": None}, [text("")]),
    "`<think>` tags next to a reasoning field": Row(
        {"content": "<think>a</think>b", "reasoning": "r"}, [("reasoning", "r", "a"), text("b")]
    ),
    "`</think>` in a reasoning field": Row(
        {"content": "b", "reasoning_content": "x</think>y"}, [("reasoning", "x"), text("y</think>b")]
    ),
    "calls without text": Row({"content": "", "tool_calls": [call()]}, [CALL], finish="tool_calls"),
    "reasoning only in `reasoning_details`": Row(
        {"content": "", "reasoning_details": [{"text": "r"}]}, [("reasoning", "r")], in_both([text("")])
    ),
    "a refusal": Row(
        {"content": None, "refusal": "no"},
        [("message", "completed", ("refusal", "no"))],
        {"0.6.0": [text("")]},
    ),
    "a cut text": Row(
        {"content": "t"},
        [text("t", "incomplete")],
        in_both([text("t")]),
        finish="length",
        status="incomplete",
    ),
    "content as a list of parts": Row(
        {"content": [{"type": "text", "text": "t"}]}, [text("t")], in_both(None)
    ),
    "a call without an id": Row(
        {"content": None, "tool_calls": [call(id=None)]}, [("function_call", "NEW", "f", "{}")], in_both(None)
    ),
    "a call with a number as id": Row(
        {"content": None, "tool_calls": [call(id=7)]}, [("function_call", "7", "f", "{}")], in_both(None)
    ),
    "a call without arguments": Row(
        {"content": None, "tool_calls": [call(arguments=None)]}, [CALL], in_both(None)
    ),
    "a call with an object as arguments": Row(
        {"content": None, "tool_calls": [call(arguments={"x": 1})]},
        [("function_call", "a", "f", '{"x":1}')],
        in_both(None),
    ),
    "a custom tool's call": Row(
        {
            "content": None,
            "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}}],
        },
        [("custom_tool_call", "a", "f", "x")],
        in_both(None),
    ),
    "`function_call`, the old field": Row(
        {"content": None, "function_call": {"name": "f", "arguments": "{}"}}, [text("")]
    ),
}
"""By the name that the table gives them."""


def items_of(response: Json) -> Items:
    """The items of a Responses object, without ids that are made anew."""
    items: Items = []
    for item in response["output"]:
        kind = item["type"]
        if kind == "reasoning":
            items.append((kind, *(part["text"] for part in item["summary"])))
        elif kind == "message":
            parts = [(part["type"], part.get("text", part.get("refusal"))) for part in item["content"]]
            items.append((kind, item["status"], *parts))
        else:
            call_id = "NEW" if item["call_id"].startswith("call_") else item["call_id"]
            items.append((kind, call_id, item["name"], item.get("arguments", item.get("input"))))
    return items
