"""The account of a table's rollouts: a partition, in its order, against plain Python over random runs."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from test_runs_aggregate import line, write_run

from gymgate.cli import cli
from gymgate.cli.conversations import conversation_text
from gymgate.cli.metrics_tables import accepted_answers
from gymgate.core.errors import DataError
from gymgate.rollouts.no_answer import NOTHING_FOUND, answer_found, is_box_unread
from gymgate.rollouts.outcome import Outcome, outcome_of
from gymgate.runs.counted.account import Account, notes_on, part_of
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.counted.metrics import summary_rows
from gymgate.runs.stored.score import NO_ANSWER

OWN = {"_ng_failure_counts_as_zero": True, "_ng_failure_class": "agent_timeout"}


def failure(
    key: int, repeat: int, kind: str = "policy", *, final: bool = True, **error: Any
) -> dict[str, Any]:
    described = {"kind": kind, "type": "PolicyError", "message": "gone", **error}
    return {**line(key, repeat, None), "status": "failed", "final": final, "error": described}


def saying(text: str, reasoning: str = "") -> dict[str, Any]:
    """A result in which the model says this."""
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": reasoning}]}
    said = {"type": "message", "content": [{"type": "output_text", "text": text}]}
    return {"response": {"output": [thought, said]}}


def accounted(
    tmp_path: Path, lines: list[dict[str, Any]], failures: list[dict[str, Any]] | None = None
) -> str:
    return str(summary_rows(read_runs([write_run(tmp_path, lines, failures=failures)]).tasks)[-1]["account"])


@pytest.mark.parametrize(
    ("fields", "remark", "part"),
    [
        ({"status": "failed", "reward": 1.0}, None, "failed"),
        ({"status": "masked", "reward": 1.0}, None, "masked"),
        ({"status": "completed", "reward": None}, NO_ANSWER, "unscored"),
        ({"status": "truncated", "reward": 1.0}, NO_ANSWER, "right"),
        ({"status": "truncated", "reward": 0.0}, NO_ANSWER, "cut off"),
        ({"status": "truncated", "reward": 0.0}, "agent_timeout", "wrong"),
        ({"status": "completed", "reward": 0.0}, NO_ANSWER, "no answer found"),
        ({"status": "completed", "reward": 0.5}, None, "wrong"),
    ],
)
def test_the_first_part_that_fits_counts(fields: dict[str, Any], remark: str | None, part: str) -> None:
    """So a judge that pays an answer which the grader did not find makes it right, and not both."""
    assert part_of(outcome_of(fields), remark) == part


def test_an_account_says_what_a_score_is_made_of(tmp_path: Path) -> None:
    retried = [{"model_server": "policy_model", "details": {"retries": 2}, "usage": {}}]
    lines = [line(0, repeat, 1.0, calls=retried) for repeat in range(7)]
    lines += [line(1, repeat, 0.0) for repeat in range(7)]
    lines += [line(1, repeat, 0.0, result=OWN) for repeat in (7, 8)]
    lines += [line(2, repeat, 0.0, answer_found=False) for repeat in range(3)]
    lines += [line(3, 0, 0.0, status="truncated", answer_found=False)]
    lost = [failure(4, 0), failure(4, 1, judge=True), *(failure(4, 0, final=False) for _ in range(4))]
    assert accounted(tmp_path, lines, lost) == (
        "22 rollouts: 7 right, 9 wrong (2 by agent_timeout), 3 no answer found, 1 cut off; "
        "2 failed (1 by judge, 1 by policy), asked again 4 times, 14 calls retried"
    )


def test_the_limits_that_cut_rollouts_off_are_named_where_they_are_known(tmp_path: Path) -> None:
    full = {"response": {"incomplete_details": {"reason": "max_output_tokens"}}}
    odd = ({"response": {"incomplete_details": ["?"]}}, {"response": []}, {})
    lines = [line(0, repeat, 0.0, status="truncated", result=full) for repeat in range(2)]
    lines += [line(1, 0, 0.0, status="truncated", limit="max_calls", result=full)]
    lines += [line(2, repeat, 0.0, status="truncated", result=result) for repeat, result in enumerate(odd)]
    lines += [line(3, 0, 1.0, status="truncated", result=full), line(3, 1, 0.0, result=full)]
    account = "8 rollouts: 1 right, 1 wrong, 6 cut off (2 by max_output_tokens, 1 by max_calls)"
    assert accounted(tmp_path, lines) == account


def test_other_rewards_than_0_and_1_are_a_distribution(tmp_path: Path) -> None:
    lines = [line(0, repeat, reward) for repeat, reward in enumerate((0.0, 2.0, 2.0))]
    table = read_runs([write_run(tmp_path / "few", lines)])
    [row] = summary_rows(table.tasks)
    assert row["account"] == "3 rollouts: 1 with reward 0, 2 with reward 2"
    assert (row["right"], row["mean_if_failed_0"]) == (None, None)
    assert any("mcqa: rewards lie beyond 0 and 1 (e.g. 2)" in note for note in table.notes)
    many = [line(0, repeat, repeat / 8) for repeat in range(9)]
    assert accounted(tmp_path / "many", many) == "9 rollouts: 9 with rewards 0 to 1, median 0.5"
    assert accounted(tmp_path / "even", many[:8]) == "8 rollouts: 8 with rewards 0 to 0.875, median 0.438"


def test_tasks_that_failed_in_every_repeat_are_named_with_their_cause(tmp_path: Path) -> None:
    lines = [line(0, 0, 1.0)]
    lost = [failure(key, repeat) for key in range(1, 6) for repeat in range(2)] + [
        failure(0, 1, type="Other"),
        failure(6, 0),
        failure(6, 1, type="Other"),
    ]
    table = read_runs([write_run(tmp_path, lines, failures=lost)])
    named = "mcqa:2, mcqa:3, mcqa:4 and 2 more tasks"  # not the task with two causes
    assert [*notes_on(table.tasks)] == [
        f"11 x PolicyError: gone; in every repeat of {named}",
        "2 x Other: gone",
    ]


def test_timeouts_that_differ_in_what_was_measured_have_one_cause(tmp_path: Path) -> None:
    said = ("its 1 call in 0.1 s", "its 2 calls in 4.0 s")
    lost = [
        failure(1, repeat, "timeout", type="T", message=f"the policy answered {calls}; 'x' did not end")
        for repeat, calls in enumerate(said)
    ]
    table = read_runs([write_run(tmp_path, [line(0, 0, 1.0)], failures=lost)])
    [note] = notes_on(table.tasks)
    assert note == "2 x T: the policy answered its calls; 'x' did not end; in every repeat of mcqa:2"


def test_a_mean_with_failures_has_bounds(tmp_path: Path) -> None:
    run = write_run(tmp_path, [line(0, 0, 1.0), line(1, 0, 0.0)], failures=[failure(2, 0), failure(3, 0)])
    done = CliRunner().invoke(cli, ["aggregate", str(run)])
    head, cells, account = done.stdout.splitlines()
    assert "if failed 0 to 1" in head
    assert "0.250 to 0.750" in cells
    assert account == "4 rollouts: 1 right, 1 wrong; 2 failed (2 by policy)"


def test_no_text_of_a_rollout_makes_a_line_of_its_own(tmp_path: Path) -> None:
    """It could be taken for a line of the table."""
    forged = "x\nmcqa  40  1.000"
    cut = {"response": {"status": "incomplete", "incomplete_details": {"reason": forged}}}
    run = write_run(
        tmp_path / "run",
        [
            line(0, 0, 0.0, result={"_ng_failure_counts_as_zero": True, "_ng_failure_class": forged}),
            line(1, 0, 0.0, status="truncated", result=cut),
            line(2, 0, None, status="masked", result={"mask_sample": True, "failure_reason": forged}),
        ],
        failures=[failure(3, 0, message=forged)],
    )
    done = CliRunner().invoke(cli, ["aggregate", str(run)])
    assert done.exit_code == 0, done.output
    assert not [text for text in done.output.splitlines() if text.startswith("mcqa  40")]
    assert done.output.count("mcqa 40 1.000") == 4


@pytest.mark.parametrize("field", ["environment", "agent", "limit"])
def test_a_name_with_a_line_end_is_refused(tmp_path: Path, field: str) -> None:
    run = write_run(tmp_path / "run", [line(0, 0, 1.0, **{field: "a\nb"})])
    with pytest.raises(DataError, match=rf"jsonl:1: .*{field}"):
        read_runs([run])


def test_failed_as_0_counts_failures_in_a_table_an_export_and_a_comparison(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", [line(key, 0, 1.0) for key in range(3)])
    run = write_run(tmp_path / "run", [line(0, 0, 1.0), line(1, 0, 0.0)], failures=[failure(2, 0)])
    done = CliRunner().invoke(cli, ["aggregate", str(run), "--failed-as", "0", "--json"])
    document = orjson.loads(done.stdout)
    [row] = document["environments"]
    assert (row["mean_reward"], row["mean_if_failed_0"]) == (pytest.approx(1 / 3), None)
    assert row["account"] == "3 rollouts: 1 right, 1 wrong; 1 failed and counted as 0 (1 by policy)"
    assert any("--failed-as" in note for note in document["notes"])
    output = tmp_path / "d.jsonl"
    for arguments, reward in (([], None), (["--failed-as", "0"], 0.0)):
        CliRunner().invoke(cli, ["export", str(run), "--to", "dataset", "-o", str(output), *arguments])
        last = orjson.loads(output.read_bytes().splitlines()[-1])
        assert (last["status"], last["error"], last["label"]) == ("failed", "PolicyError: gone", "mcqa:3")
        assert (last["reward"], last["task"]) == (reward, f"mcqa/{2:016x}")
    page = tmp_path / "report.html"
    for arguments, is_said in (([], False), (["--failed-as", "0"], True)):
        done = CliRunner().invoke(cli, ["report", str(run), "-o", str(page), *arguments])
        assert done.exit_code == 0, done.output
        assert ("failed and counted as 0" in page.read_text()) == is_said
    done = CliRunner().invoke(cli, ["compare", str(whole), str(run), "--failed-as", "0", "--json"])
    [compared] = orjson.loads(done.stdout)["compared"][0]["environments"]
    assert (compared["pairs"], compared["left_out"], compared["second"]) == (3, 0, pytest.approx(1 / 3))


def test_a_failed_rollout_has_its_tokens_in_an_export_and_a_task_its_label_in_a_file(tmp_path: Path) -> None:
    used = {
        "calls": 1,
        "input_tokens": 7,
        "cached_tokens": None,
        "output_tokens": 3,
        "reasoning_tokens": None,
    }
    lost = [{**failure(1, 0), "usage": {"policy_model": used}}, {**failure(2, 0), "usage": {}}]
    run = write_run(tmp_path / "run", [line(0, 0, 1.0)], failures=lost)
    output, tasks = tmp_path / "d.jsonl", tmp_path / "tasks.jsonl"
    CliRunner().invoke(cli, ["export", str(run), "--to", "dataset", "-o", str(output)])
    rows = map(orjson.loads, output.read_bytes().splitlines()[1:])
    assert [(row["input_tokens"], row["output_tokens"]) for row in rows] == [(7, 3), (None, None)]
    CliRunner().invoke(cli, ["aggregate", str(run), "-o", str(tasks)])
    labels = [orjson.loads(row)["label"] for row in tasks.read_bytes().splitlines()]
    assert labels == ["mcqa:1", "mcqa:2", "mcqa:3"]


def test_exports_of_what_finished_hold_no_failure_and_name_no_error_of_a_masked_rollout(
    tmp_path: Path,
) -> None:
    masked = {"mask_sample": True, "failure_kind": "sandbox", "failure_reason": "gone"}
    lines = [line(0, 0, 1.0), line(1, 0, 1.0, status="masked", result=masked)]
    run, output = write_run(tmp_path / "run", lines, failures=[failure(2, 0)]), tmp_path / "x.jsonl"
    CliRunner().invoke(cli, ["export", str(run), "--to", "jsonl", "-o", str(output)])
    assert [orjson.loads(row)["status"] for row in output.read_bytes().splitlines()] == [
        "completed",
        "masked",
    ]
    CliRunner().invoke(cli, ["export", str(run), "--to", "dataset", "-o", str(output)])
    rows = [orjson.loads(row) for row in output.read_bytes().splitlines()]
    assert [row["error"] for row in rows] == [None, None, "PolicyError: gone"]


def test_environments_whose_servers_failed_or_died_are_those_to_check(tmp_path: Path) -> None:
    lost = [failure(0, 0), failure(1, 0, "infrastructure", type="ServerDiedError")]
    lost[1]["environment"] = "mine"
    run = write_run(tmp_path / "run", [], failures=lost)
    assert read_runs([run]).tasks.broken_environments == {"mine"}


@pytest.mark.parametrize("form", ["atif", "gym", "inspect", "jsonl", "traces"])
def test_failed_as_is_refused_where_failures_are_not_written(tmp_path: Path, form: str) -> None:
    run = write_run(tmp_path / "run", [line(0, 0, 1.0)], failures=[failure(1, 0)])
    words = ["export", str(run), "--to", form, "-o", str(tmp_path / "x"), "--failed-as", "0"]
    done = CliRunner().invoke(cli, words)
    assert "--failed-as counts failures" in str(done.exception)


def test_the_worst_tasks_are_printed_below_the_table(tmp_path: Path) -> None:
    lines = [line(key, repeat, float(repeat < key)) for key in range(3) for repeat in range(2)]
    run = write_run(tmp_path / "run", lines, failures=[failure(3, 0)])
    done = CliRunner().invoke(cli, ["aggregate", str(run), "--worst", "2"])
    assert [text.split()[:2] for text in done.stdout.split("\n\n")[1].splitlines()[1:]] == [
        ["mcqa:1", "0.000"],
        ["mcqa:2", "0.500"],
    ]


def test_an_answer_that_was_not_found_is_named_wherever_a_rollout_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(0, 0, 0.0, answer_found=False), line(0, 1, 0.0, answer="A")])
    first, second = read_runs([run]).rollouts()
    assert "extracted answer: none" in conversation_text(first.rollout())
    assert "extracted answer: A" in conversation_text(second.rollout())
    CliRunner().invoke(cli, ["export", str(run), "--to", "dataset", "-o", str(tmp_path / "d.jsonl")])
    rows = [orjson.loads(text) for text in (tmp_path / "d.jsonl").read_bytes().splitlines()]
    assert [row["extracted_answer"] for row in rows] == ["none", "A"]


def test_what_a_grader_accepts_is_said_if_more_than_a_third_had_no_answer_or_none_is_right(
    tmp_path: Path,
) -> None:
    row = {"environment": "mcqa", "rollouts": 9, "no_answer": 3, "right": 1, "wrong": 5}
    assert [*accepted_answers([row])] == []
    assert [*accepted_answers([{**row, "right": None, "wrong": None}])] == []
    (none_right,) = accepted_answers([{**row, "right": 0, "wrong": 6}])
    assert "found no right answer in 9 of 9 rollouts" in none_right
    known, own = accepted_answers([{**row, "no_answer": 4}, {**row, "environment": "own", "no_answer": 4}])
    assert r"accepts \boxed{answer}" in known
    assert "gymgate info own" in own
    (recorded,) = accepted_answers([{**row, "environment": "calendar", "no_answer": 4}])
    assert "gymgate run calendar --show" in recorded, "its rows hold no answer, and its recordings do"
    run = write_run(tmp_path / "run", [line(0, 0, 0.0, answer_found=False)])
    CliRunner().invoke(cli, ["report", str(run)])
    assert "accepts" in (run / "report.html").read_text()


def test_zeros_for_a_box_that_the_library_did_not_read_are_told(tmp_path: Path) -> None:
    """math_verify reads nothing after its time either, so it may be a right answer."""
    none_read = {"library_reward": 0.0, "extracted_answer": None, **saying(r"\boxed{7}")}
    results = [none_read, {**none_read, "extracted_answer": "8"}, {**none_read, "response": {"output": []}}]
    lines = [line(key, 0, 0.0, result=result) for key, result in enumerate(results)]
    lines.append(line(3, 0, 1.0, result=none_read))  # its judge paid
    tasks = read_runs([write_run(tmp_path / "run", lines)]).tasks
    assert str(Account.of(tasks.tasks.values(), tasks)) == (
        "4 rollouts: 1 right, 3 wrong (1 by a box that math_verify could not read)"
    )
    assert [note for note in notes_on(tasks) if note.startswith("mcqa: 1 rewards are 0 since math_verify")]


@pytest.mark.parametrize(
    ("result", "is_unread"),
    [
        (saying(r"It is \boxed{\frac{1}{2}}."), True),
        (saying(r"\boxed{}, no, \boxed{7}"), True),
        (saying(r"\boxed{7}, no, \boxed{ }"), False),
        (saying(r"\boxed{\frac{1}{2}"), False),
        (saying("7", reasoning=r"I am to use \boxed{7}."), False),
        ({"response": {"output": [], "instructions": r"Use \boxed{}, as \boxed{7}."}}, False),
        ({**saying(r"\boxed{7}"), "judge_evaluations": [{}]}, False),
        ({**saying(r"\boxed{7}"), "judge_evaluations": None}, True),
        ({"response": [r"\boxed{7}"]}, False),
        ({"response": {"output": [None, {"type": "message", "content": None}]}}, False),
        ({}, False),
    ],
)
def test_only_a_box_that_the_library_was_given_is_unread(result: dict[str, Any], is_unread: bool) -> None:
    """A judge's verdict, reasoning, and what is no answer to the server either, are no sign of a library that is slow."""
    assert is_box_unread({"library_reward": 0.0, "extracted_answer": None, **result}) is is_unread


def test_a_box_of_a_masked_rollout_is_no_zero(tmp_path: Path) -> None:
    unread = {"library_reward": 0.0, "extracted_answer": None, **saying(r"\boxed{7}")}
    tasks = read_runs([write_run(tmp_path / "run", [line(0, 0, 0.0, status="masked", result=unread)])]).tasks
    assert not [note for note in notes_on(tasks) if "math_verify" in note]


def test_a_field_says_it_only_where_all_of_an_entry_hold() -> None:
    assert answer_found("mcqa", {"extracted_answer": None}) is False
    assert answer_found("mcqa", {"extracted_answer": "A"}) is True
    assert answer_found("mcqa", {}) is None
    assert answer_found("simpleqa", {"extracted_answer": None}) is None
    assert answer_found(None, {"extracted_answer": None}) is None
    inductive = {"extraction_successful": False, "agent_mode": "inductive"}
    assert answer_found("nvarc", inductive) is True
    for text, found in {"3": False, r"\boxed{3}": None, r"\boxed{\frac{1}{2}}.": None}.items():
        assert answer_found("math_with_judge", {"extracted_answer": None, **saying(text)}) is found
    assert not {"simpleqa", "abstention", "reasoning_gym", "hotpotqa_qa"} & NOTHING_FOUND.keys()


def test_random_runs_against_plain_python(tmp_path: Path) -> None:
    """Parts add up to all rollouts, and each number is what a reader of the lines would count."""
    dice = random.Random(5)
    for number in range(100):
        is_binary = dice.random() < 0.5
        rewards = (0.0, 1.0) if is_binary else (0.0, 0.25, 1.0)
        lines, lost, parts = [], [], Counter[str]()
        scored: list[float] = []
        for key in range(dice.randint(1, 4)):
            for repeat in range(dice.randint(1, 5)):
                if dice.random() < 0.2:
                    lost.append(failure(key, repeat, dice.choice(["policy", "timeout"])))
                    parts["failed"] += 1
                    continue
                status = dice.choice(["completed", "completed", "truncated", "masked"])
                reward, found = dice.choice([*rewards, None]), dice.choice([True, False, None])
                lines.append(line(key, repeat, reward, status=status, answer_found=found))
                if status == "masked":
                    parts["masked"] += 1
                    continue
                if reward is None:
                    parts["unscored"] += 1
                    continue
                scored.append(reward)
                if reward == 1:
                    parts["right"] += 1
                elif status == "truncated":
                    parts["cut off"] += 1
                else:
                    parts["wrong" if found is not False else "no answer found"] += 1
        table = read_runs([write_run(tmp_path / str(number), lines, failures=lost)])
        account = Account.of(table.tasks.ordered(), table.tasks)
        assert +account.parts == parts
        assert account.parts.total() == len(lines) + len(lost) == account.counts.rollouts
        if lost and scored:
            count = len(scored) + len(lost)
            assert account.bounds == pytest.approx((sum(scored) / count, (sum(scored) + len(lost)) / count))
        else:
            assert account.bounds is None
        [row] = summary_rows(table.tasks) or [{"right": 0}]
        if account.is_binary:
            assert row["right"] == parts["right"]


def test_an_outcome_without_a_reward_has_its_reason() -> None:
    assert part_of(Outcome(False, False, False, False, "masked")) == "masked"
