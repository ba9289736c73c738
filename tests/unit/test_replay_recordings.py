"""Recorded rollouts cut into turns, and joined with the rows they were recorded for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gymgate.errors import DataError
from gymgate.gateway.replay.recording import Recording, pair_rows, recorded_rollouts, recorded_rows


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text, "type": "message"}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": f"msg_{text}", "type": "message", "role": "assistant", "content": content}


def call(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, text: str = "ok") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


def reasoning(text: str = "hm") -> dict[str, Any]:
    return {"id": "rs", "type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def record(given: Any, items: list[Any], **fields: Any) -> dict[str, Any]:
    response = {"id": "resp_1", "created_at": 7.0, "model": "m", "output": items}
    return {"responses_create_params": {"input": given, "tools": None}, "response": response, **fields}


def recordings(path: Path, *records: Any) -> list[Recording]:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
    return recorded_rollouts([path])


A, B, C = said("a"), said("b"), said("c")
R, F1, F2, O1, O2, U = reasoning(), call("1"), call("2"), output("1"), output("2"), user("go on")

TURNS: dict[str, tuple[list[Any], list[list[Any]]]] = {
    "one message": ([A], [[A]]),
    "reasoning belongs to what follows": ([R, A], [[R, A]]),
    "tool calls end a turn": ([F1, O1, F2, O2, A], [[F1], [F2], [A]]),
    "parallel calls are one turn": ([A, F1, F2, O1, O2, B], [[A, F1, F2], [B]]),
    "the environment's messages end a turn": ([A, U, B, U], [[A], [B]]),
    "items after an answered call are its turn's": ([F1, R, O1, A], [[F1, R], [A]]),
    "an output that was not recorded": ([A, F1, B, F2], [[A, F1], [B, F2]]),
    "a message that was not recorded": ([R, A, R, B], [[R, A], [R, B]]),
    "a conversation of the agent's own": ([{"role": "system", "content": "s"}, U, A], [[A]]),
    "nothing kept": ([], []),
    "a state after each step": ([[U, F1, O1], [U, F1, O1, R, F2, O2]], [[F1], [R, F2]]),
    "a state that was collapsed": ([[U, F1, O1], [user("hidden"), F1, O1, A]], [[F1], [A]]),
}


@pytest.mark.parametrize("case", TURNS)
def test_turns(tmp_path: Path, case: str) -> None:
    items, turns = TURNS[case]
    (recording,) = recordings(tmp_path / "r.jsonl", record("hello", items))
    assert recording.turns == turns


def test_prompts_hold_everything_said_before(tmp_path: Path) -> None:
    flat, states, own = recordings(
        tmp_path / "r.jsonl",
        record([U], [F1, O1, A]),
        record([], [[U, F1, O1], [U, F1, O1, A]]),
        record([U], [{"role": "system", "content": "s"}, B, A]),
    )
    assert [step.prompt for step in flat.steps] == [[U], [U, F1, O1]]
    assert [step.prompt for step in states.steps] == [[U], [U, F1, O1]]
    assert own.steps[0].prompt == [{"role": "system", "content": "s"}]


def test_row_is_the_record_without_its_outcome(tmp_path: Path) -> None:
    (recording,) = recordings(tmp_path / "r.jsonl", "", record([U], [A], reward=1, answer="x"))
    assert recording.row == {"responses_create_params": {"input": [U]}, "answer": "x"}
    assert (recording.reward, recording.line, recording.index, recording.name) == (1.0, 2, 0, "r.jsonl:2")


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ("<PLACEHOLDER ROW>", "is not JSON"),
        ('{"reward": 1}', "'responses_create_params'"),
        ('{"responses_create_params": {"input": "x"}}', "'response'"),
        ('{"responses_create_params": {"input": "x"}, "response": {}}', "'output'"),
        ('{"responses_create_params": {"input": "x"}, "response": {"output": ["a"]}}', "an output item"),
        ('{"responses_create_params": {"input": ["a"]}, "response": {"output": []}}', "an input item"),
    ],
)
def test_malformed_records_name_file_and_line(tmp_path: Path, bad: str, what: str) -> None:
    with pytest.raises(DataError, match=rf"r\.jsonl:2 .*{what}") as caught:
        recordings(tmp_path / "r.jsonl", record([U], [A]), bad)
    assert (caught.value.path, caught.value.line) == (str(tmp_path / "r.jsonl"), 2)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read recorded rollouts .*none\.jsonl: No such file"):
        recorded_rollouts([tmp_path / "none.jsonl"])


def row(given: Any, **fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": given}, **fields}


def test_rows_are_paired_by_input_then_fields_then_position(tmp_path: Path) -> None:
    rows = [
        row([user("x")], answer=1),
        row([user("x")], answer=2),
        row("y", expected=3),
        row([{"role": "developer", "content": "s"}, user("z")]),
        row([], task_idx=0),
        row([], task_idx=1),
    ]
    found = recordings(
        tmp_path / "r.jsonl",
        record([user("x")], [A], answer=2),
        record([user("x")], [A]),
        record([user("y"), user("an observation")], [A]),
        record([{"role": "system", "content": "s"}, user("z ")], [A]),
        record([], [[U, A]], task_idx=0),
        record([], [[U, A]]),
        record("unknown", [A]),
    )
    assert pair_rows(found, rows) == [rows[1], rows[1], rows[2], rows[3], rows[4], rows[5], None]


def test_rows_that_some_recording_begins_with(tmp_path: Path) -> None:
    found = recordings(tmp_path / "r.jsonl", record([user("x"), user("an observation")], [A]))
    rows = [row("x", n=1), row("y"), row("x", n=2), row([user("x"), user("an")]), row([user("x"), A])]
    assert recorded_rows(found, rows) == [rows[0], rows[2]]
