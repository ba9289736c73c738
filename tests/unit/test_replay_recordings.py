"""Recorded rollouts cut into turns, and joined with the rows they were recorded for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.errors import DataError
from gymgate.gateway.replay.backend import complete_item
from gymgate.gateway.replay.conversation import Block, blocks_of
from gymgate.gateway.replay.index import ReplayIndex
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
    "parallel calls without outputs": ([F1, F2, A], [[F1, F2], [A]]),
    "a state without the prompt": (
        [[said("own"), F1, O1], [said("own"), F1, O1, A]],
        [[said("own"), F1], [A]],
    ),
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
    assert recordings(tmp_path / "r.jsonl", record([U], [A], reward=10**400))[0].reward is None


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        ("<PLACEHOLDER ROW>", "JSON"),
        ('{"reward": 1}', "'responses_create_params'"),
        ('{"responses_create_params": {"input": "x"}}', "'response'"),
        ('{"responses_create_params": {"input": "x"}, "response": {}}', "'output'"),
        ('{"responses_create_params": {"input": "x"}, "response": {"output": ["a"]}}', "output item"),
        ('{"responses_create_params": {"input": ["a"]}, "response": {"output": []}}', "input item"),
        (json.dumps(record([U], [[U, A], [U, 5]])), "output item"),
        (json.dumps(record([U], [{"type": 5}])), "output item"),
        (json.dumps(record([U], [F1, O1 | {"call_id": []}])), "output item"),
        (json.dumps(record([U], [{"role": "assistant", "content": 5}])), "output item"),
        (json.dumps(record([U], [output("1") | {"output": [None]}])), "output item"),
        (
            json.dumps({"responses_create_params": {"instructions": 5}, "response": {"output": []}}),
            "input item",
        ),
    ],
)
def test_malformed_records_name_file_and_line(tmp_path: Path, bad: str, what: str) -> None:
    with pytest.raises(DataError, match=rf"r\.jsonl:2 .*{what}") as caught:
        recordings(tmp_path / "r.jsonl", record([U], [A]), bad)
    assert (caught.value.path, caught.value.line) == (str(tmp_path / "r.jsonl"), 2)


def test_a_damaged_line_of_a_run_is_named(tmp_path: Path) -> None:
    call = {"status_code": 200, "request": {"input": "x"}, "response": {"output": []}}  # no dialect
    path = tmp_path / "r.jsonl"
    for bad in (run_line(call, result={}), run_line(None, result={}), run_line(call, result=[1])):
        with pytest.raises(DataError, match=r"r\.jsonl:1 .*damaged") as caught:
            recordings(path, json.dumps(bad))
        assert (caught.value.path, caught.value.line) == (str(path), 1)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        recorded_rollouts([tmp_path / "none.jsonl"])
    assert caught.value.path == str(tmp_path / "none.jsonl")


def test_no_number_of_a_record_changes(tmp_path: Path) -> None:
    """An id beyond 64 bits, in the record and so in the row that is made of it."""
    (recording,) = recordings(tmp_path / "r.jsonl", record([U], [A], task_id=12345678901234567890123))
    assert recording.row["task_id"] == 12345678901234567890123


def test_a_list_of_broken_lines_takes_them(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(f"<PLACEHOLDER ROW>\n{json.dumps(record([U], [A]))}\n[]\n")
    broken: list[DataError] = []
    (recording,) = recorded_rollouts([tmp_path / "none.jsonl", tmp_path / "r.jsonl"], broken=broken)
    assert (recording.line, recording.index) == (2, 0)
    assert [(Path(str(error.path)).name, error.line) for error in broken] == [
        ("none.jsonl", None), ("r.jsonl", 1), ("r.jsonl", 3),
    ]  # fmt: skip


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


def test_of_equal_rows_the_first_is_paired(tmp_path: Path) -> None:
    found = recordings(tmp_path / "r.jsonl", *[record([user("x")], [A])] * 4)
    rows = [row([user("x")], n=n) for n in range(2)]
    assert pair_rows(found, rows) == [rows[0], rows[1], rows[0], rows[0]]


def test_rows_that_some_recording_begins_with(tmp_path: Path) -> None:
    found = recordings(tmp_path / "r.jsonl", record([user("x"), user("an observation")], [A]))
    rows = [row("x", n=1), row("y"), row("x", n=2), row([user("x"), user("an")]), row([user("x"), A])]
    assert recorded_rows(found, rows) == [rows[0], rows[2]]


def test_rows_and_recordings_are_not_compared_each_with_each(tmp_path: Path, monkeypatch: Any) -> None:
    """As many as gsm8k's test rows with eight recordings each are 14 million pairs, which took minutes."""
    count, repeats = 40, 8
    found = recordings(
        tmp_path / "r.jsonl", *[record([user(f"question {n}")], [A]) for n in range(count)] * repeats
    )
    rows = [row([user(f"question {n}")], n=n) for n in range(count + 1)]
    compared = []
    monkeypatch.setattr(
        Block, "compared_parts", lambda self, real=Block.compared_parts: compared.append(self) or real(self)
    )
    assert recorded_rows(found, rows) == rows[:count]
    assert pair_rows(found, rows) == rows[:count] * repeats
    assert len(compared) <= 2 * 4 * (count * (repeats + 1) + 1)


def kept_call(request: Any, response: Any, **fields: Any) -> dict[str, Any]:
    """A policy call in a line of a run, as `gymgate run -o` with `--bodies` writes it."""
    call = {"index": 0, "model_server": "policy_model", "dialect": "responses", "status_code": 200}
    return {**call, "request": request, "response": response, **fields}


def run_line(*calls: Any, result: Any, status: str = "completed", **fields: Any) -> dict[str, Any]:
    head = {"row_key": "0" * 16, "occurrence": 0, "repeat": 0, "seed": None, "environment": "e", "agent": "a"}
    return {**head, "status": status, "reward": 1.0, "result": result, "calls": list(calls), **fields}


def test_a_line_of_a_run_is_the_agents_answer(tmp_path: Path) -> None:
    result = record([U], [F1, O1, A], answer="x")
    call = {"model_server": "policy_model", "dialect": "responses", "status_code": 200}
    (recording,) = recordings(tmp_path / "r.jsonl", run_line(call, result=result))
    assert recording.turns == [[F1], [A]]
    assert (recording.reward, recording.row["answer"]) == (1.0, "x")


def test_a_line_of_a_run_with_bodies_has_the_turns_that_were_asked_for(tmp_path: Path) -> None:
    """Two conversations of one agent, which its answer does not tell apart; the second by chat-completions."""
    tool_call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [tool_call]}
    chat = {
        "messages": [
            {"role": "user", "content": "other"},
            asked,
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
        ]
    }
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "b"}}
    line = run_line(
        kept_call({"input": [U]}, {"output": [A]}),
        kept_call({"input": "is it right?"}, {"output": [C]}, model_server="judge"),
        kept_call({"input": [U]}, {"error": {"message": "busy"}}, status_code=500),
        kept_call(chat, {"id": "c", "model": "m", "choices": [choice]}, dialect="chat"),
        result={"reward": 1.0},
    )
    (recording,) = recordings(tmp_path / "r.jsonl", line)
    first, second = recording.steps
    assert (first.prompt, first.output) == ([U], [A])
    assert [item.get("type", "message") for item in second.prompt] == [
        "message", "function_call", "function_call_output",
    ]  # fmt: skip
    assert second.output[0]["content"][0]["text"] == "b"
    assert recording.response["model"] == "m"
    found = ReplayIndex([recording]).find({"input": second.prompt})
    assert (found.turn, found.kind) == (1, "exact")


def test_an_answer_that_came_translated_is_read_as_the_endpoint_gave_it(tmp_path: Path) -> None:
    request = {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    shown = {"type": "message", "content": [{"type": "text", "text": "a"}]}
    call = kept_call(request, shown, dialect="messages", upstream_response={"output": [A]})
    (recording,) = recordings(tmp_path / "r.jsonl", run_line(call, result={}))
    assert recording.turns == [[A]]


def test_a_run_on_disk_answers_as_the_recordings_that_it_replayed() -> None:
    earlier = Path(__file__).with_name("earlier_run")
    index = ReplayIndex(recorded_rollouts([earlier / "recordings.jsonl"]))
    run = recorded_rollouts([earlier / "run" / "rollouts.jsonl"])
    assert [len(each.steps) for each in run] == [1, 2, 2, 2]  # its numbers of policy calls
    for step in (step for each in run for step in each.steps):
        match = index.find({"input": step.prompt})
        assert match.kind == "exact"
        assert blocks_of(match.step.output)[0].compared_parts() == blocks_of(step.output)[0].compared_parts()


def test_of_a_run_a_failed_rollout_has_no_turns_and_another_without_bodies_is_refused(tmp_path: Path) -> None:
    failed = run_line(result=None, status="failed", reward=None)
    assert [each.turns for each in recordings(tmp_path / "r.jsonl", failed)] == [[]]
    with pytest.raises(DataError, match=r"r\.jsonl:2 .*--bodies"):
        recordings(tmp_path / "r.jsonl", failed, run_line(result={"responses_create_params": {}}))
    broken = kept_call({"messages": "x"}, {"output": [A]}, dialect="chat")
    with pytest.raises(DataError, match=r"r\.jsonl:1 messages "):
        recordings(tmp_path / "r.jsonl", run_line(broken, result={}))


@pytest.mark.parametrize(("content", "texts"), [("", [""]), ("hi", ["hi"]), (None, []), ([], [])])
def test_an_empty_text_is_a_part_of_an_answer(content: object, texts: list[str]) -> None:
    item = complete_item({"type": "message", "content": content}, "seed")
    assert [part["text"] for part in item["content"]] == texts
