"""The right answer that a row holds: where it stands, and a recording of a policy that gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gymgate.core import codec

_FIELDS = (
    "expected_answer", "answer", "ground_truth", "expected_output", "expected_result", "expected_judgement", "expected_answers",
    "expected_action", "expected_call", "correct_index", "target", "ideal", "outputs",
)  # fmt: skip
"""Fields of rows that hold the right answer, most telling first."""
NESTED_FIELDS = ("verifier_metadata", "expected_values")
"""Objects of a row in which they may be."""

Item = Mapping[str, Any]
Calls = tuple[Item, ...]
"""The calls of tools that a row lists as its answer."""
DONE: Item = {"type": "message", "role": "assistant", "content": "Done."}


class RowAnswer(NamedTuple):
    """The right answer of a row."""

    field: str
    """Dotted path of the field that holds it."""
    value: Any


def answer_of(row: Mapping[str, Any]) -> RowAnswer | None:
    """Find the right answer in a row."""
    for name in ("", *NESTED_FIELDS):
        holder = row if not name else row.get(name)
        if not isinstance(holder, dict):
            continue
        for field in _FIELDS:
            value = holder.get(field)
            if isinstance(value, dict) and value.get("type") == "message":
                value = value.get("content")
            if value is not None and value != "" and (not isinstance(value, dict) or calls_in(value)):
                return RowAnswer(f"{name}.{field}".lstrip("."), value)
    return None


def calls_in(value: Any) -> Calls:
    """The calls of tools that a value lists; empty if it is something else."""
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) and "name" in call and "arguments" in call for call in calls):
        return ()
    return tuple(
        {
            "type": "function_call",
            "name": call["name"],
            "arguments": call["arguments"]
            if isinstance(call["arguments"], str)
            else codec.dumps(call["arguments"]).decode(),
        }
        for call in calls
    )


def oracle_rollout(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A rollout as it would be recorded of a policy that makes the calls that the row lists; `None` if it lists none."""
    answer = answer_of(row)
    output: list[Item] = []
    for n, call in enumerate(calls_in(answer.value) if answer else ()):
        result = {"type": "function_call_output", "call_id": f"oracle_{n}", "output": ""}
        output += [{**call, "call_id": f"oracle_{n}"}, result]
    return {**row, "response": {"id": "oracle", "output": [*output, DONE]}} if output else None
