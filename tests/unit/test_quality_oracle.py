"""The oracle: the answer that a row holds, how its prompt asks for it, the phrasings, and what is noticed."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any, cast

import pytest

from gymgate.quality import CheckResult
from gymgate.quality.model import Thresholds
from gymgate.quality.record import trials
from gymgate.quality.record.findings import problems, right_answer, unmet_thresholds
from gymgate.quality.record.phrasings import (
    Phrasing,
    asked_for,
    calling_policy,
    forms_of,
    policy_of,
    texts_of,
)
from gymgate.quality.record.trials import measure, measure_right_answers
from gymgate.quality.sections import Oracle, Probes
from gymgate.rollouts.answers import answer_of, calls_in, oracle_rollout
from support.graders import Scored, row, texts

CALL = {"name": "send", "arguments": {"to": "me"}}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"expected_answer": "B", "answer": "C"}, ("expected_answer", "B")),
        ({"verifier_metadata": {"ideal": "x"}}, ("verifier_metadata.ideal", "x")),
        ({"expected_action": {"type": "message", "content": "hi"}}, ("expected_action", "hi")),
        ({"ground_truth": [CALL]}, ("ground_truth", [CALL])),
        ({"expected_answer": "", "answer": 0}, ("answer", 0)),
        ({"answer": {"a": 1}}, None),
        ({"question": "?"}, None),
    ],
)
def test_the_answer_is_found(fields: dict[str, Any], found: Any) -> None:
    assert answer_of(row(**fields)) == found


def test_the_forms_of_an_answer() -> None:
    assert forms_of(row(answer=3)) == {"answer": "3", "JSON": '"3"', "formula": r"\(3\)"}
    assert forms_of(row(answer='["a", "b"]'))["items"] == "a, b"
    grid = forms_of(row(expected_output=[[0, 8], [8, 0]]))
    assert (grid["grid"], grid["lines"]) == ("0 8\n8 0", "08\n80")
    assert forms_of(row(answer="B", options=[{"A": "one"}, {"B": "two"}]))["option"] == "two"
    assert set(forms_of(row(ground_truth=[CALL, CALL]))) == {"calls", "calls at once"}
    assert set(forms_of(row(expected_call=CALL))) == {"calls"}


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        (r"Put it in \boxed{}.", r"\boxed{answer}"),
        (
            "<choices><choice>a</choice></choices> Respond in <choice></choice> tags.",
            "<choice>answer</choice>",
        ),
        ("<best>Index</best>", "<best>answer</best>"),
        ('Reply as {"answer": "<your answer>"}.', '{"answer": JSON}'),
        ("the format: 'Answer: LETTER'", "Answer: answer"),
        ("in the form 'Final Answer: [node1, node2, ...]'", "Final Answer: [items]"),
        ("enclosed in double parentheses", "((answer))"),
        (r"In LaTeX one writes \boxed{x}. End with 'Answer: LETTER'.", "Answer: answer"),
        ("What is 2 + 2?", None),
    ],
)
def test_what_the_prompt_asks_for(prompt: str, name: str | None) -> None:
    asked = asked_for(row(prompt, answer="x"))
    assert (asked[0].name if asked else None) == name


def test_a_number_is_one_answer_however_it_is_written() -> None:
    one, *others = (
        texts_of(forms_of(row(answer=answer))) for answer in ("1000", "1,000", "1000.0", "$1000$")
    )
    assert others == [one] * 3
    assert texts_of(forms_of(row(answer="1, 000"))) != texts_of(forms_of(row(answer="1; 000")))


async def test_a_policy_says_the_answer_or_plays_the_calls() -> None:
    said = policy_of(Phrasing("<a>", "answer", "</a>"), forms_of(row(answer="x")))
    assert await texts(said, 2) == [["<a>x</a>"]] * 2
    calls = calls_in([CALL, {**CALL, "name": "stop"}])
    assert [call["arguments"] for call in calls] == ['{"to":"me"}'] * 2
    assert await texts(calling_policy(calls), 3) == [["send"], ["stop"], ["Done."]]
    assert await texts(calling_policy(calls, at_once=True), 2) == [["send", "stop"], ["Done."]]
    forms = forms_of(row(ground_truth=[CALL, {**CALL, "name": "stop"}]))
    played = {form: await texts(policy_of(Phrasing("", form, ""), forms), 1) for form in forms}
    assert played == {"calls": [["send"]], "calls at once": [["send", "stop"]]}


def test_a_row_that_lists_its_calls_is_a_recording_of_them() -> None:
    made = oracle_rollout(row(ground_truth=[CALL, {**CALL, "name": "stop"}]))
    assert made is not None
    items = [(item.get("name"), item.get("call_id")) for item in made["response"]["output"][:-1]]
    assert items == [("send", "oracle_0"), (None, "oracle_0"), ("stop", "oracle_1"), (None, "oracle_1")]
    assert oracle_rollout(row(answer="x")) is None


def test_a_call_may_have_an_integer_of_any_length() -> None:
    (call,) = calls_in({"name": "send", "arguments": {"id": 2**70}})
    assert call["arguments"] == f'{{"id":{2**70}}}'


FRANCE = row(r"Capital of France? Use \boxed{}.", answer="Paris")
ITALY = row(r"Capital of Italy? Use \boxed{}.", answer="Rome")


def strict(row: dict[str, Any], text: str) -> bool:
    return text == rf"\boxed{{{row['answer']}}}"


async def measured(rows: list[dict[str, Any]], pay: Any, **settings: Any) -> Oracle:
    context: Any = Scored(rows, pay, **settings)
    return await measure_right_answers(context)


async def probed(rows: list[dict[str, Any]], pay: Any) -> Probes:
    return await measure(cast("Any", Scored(rows, pay)))


def record(oracle: Oracle | None) -> CheckResult:
    return CheckResult(
        environment="e",
        kind="config",
        nemo_gym="0.7.0",
        gymgate="0",
        date="d",
        verdict="match",
        oracle=oracle,
    )


async def test_a_sound_environment_pays_what_its_prompt_asks_for_and_nothing_else() -> None:
    oracle = await measured([FRANCE, ITALY], strict)
    assert (oracle.field, oracle.asked_for, oracle.rows, oracle.solved) == ("answer", r"\boxed{answer}", 2, 2)
    assert oracle.accepted == [r"\boxed{answer}"]
    assert (oracle.phrasings["answer"].zero_rows, oracle.phrasings["answer"].partial_rows) == (2, 0)
    assert r"\boxed{answer}" in str(oracle)
    assert "at least 2 of 2 rows" in right_answer(record(oracle))
    assert list(problems(record(oracle))) == []
    assert list(unmet_thresholds(record(oracle), Thresholds(min_oracle_reward=1.0))) == []


async def test_a_wrong_key_leaves_its_row_unsolved() -> None:
    wrong = {**ITALY, "answer": "Lyon", "really": "Rome"}

    def pay(row: dict[str, Any], text: str) -> bool:
        return str(row.get("really", row["answer"])) in text

    oracle = await measured([FRANCE, wrong], pay)
    assert (oracle.solved, oracle.unsolved, oracle.reward) == (1, ("row 1",), 0.5)
    (line,) = unmet_thresholds(record(oracle), Thresholds(min_oracle_reward=1.0))
    assert line.startswith("--min-oracle-reward 1: ")
    assert line.endswith("row 1")
    nothing = await measured([wrong], pay)
    [line] = map(str, problems(record(nothing)))
    assert "('answer')" in line


async def test_a_trap_in_the_phrasing_is_a_finding() -> None:
    oracle = await measured([FRANCE, ITALY], lambda row, text: text == row["answer"])
    [line] = map(str, problems(record(oracle)))
    assert r"(\boxed{answer})" in line
    assert "another" not in line


@pytest.mark.parametrize(
    ("fields", "settings", "reason"),
    [
        ({}, {}, "no answer"),
        ({"verifier_metadata": {"unit_tests": []}}, {}, "program"),
        ({"rubric": "r"}, {}, "judge"),
        ({"answer": "x"}, {"judges": True}, "judge"),
    ],
)
async def test_why_right_answers_were_not_tried(
    fields: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    oracle = await measured([row(**fields)], lambda row, text: False, **settings)
    assert reason in str(oracle.reason)
    assert list(problems(record(oracle))) == []
    assert list(unmet_thresholds(record(oracle), Thresholds(min_oracle_reward=1.0))) == [
        f"--min-oracle-reward: not measured: {oracle.reason}"
    ]


async def test_an_answer_as_asked_for_that_got_no_reward_says_nothing_of_the_grader() -> None:
    def pay(row: dict[str, Any], text: str) -> bool | None:
        return None if "boxed" in text else False

    oracle = await measured([FRANCE, ITALY], pay)
    assert (oracle.reason, list(problems(record(oracle)))) == ("other", [])


async def test_rollouts_that_are_scored_against_each_other_have_no_oracle(tmp_path: Path) -> None:
    (config := tmp_path / "c.yaml").write_text("s: {resources_servers: {e: {num_rollouts_per_prompt: 4}}}")
    oracle = await measured([FRANCE], strict, config=config)
    assert oracle.reason == "scored against siblings"


@pytest.mark.parametrize(("earned", "solved"), [(1.0, 0), (10.0, 2)])
async def test_the_full_reward_is_the_highest_that_was_recorded(earned: float, solved: int) -> None:
    def pay(row: dict[str, Any], text: str) -> float:
        return earned * strict(row, text)

    oracle = await measured([FRANCE, ITALY], pay, recorded=(0.0, 10.0))
    assert (oracle.full, oracle.solved, oracle.reward) == (10.0, solved, earned)


@pytest.mark.parametrize(
    "answers",
    [
        ("Paris", " paris"),
        (4, "4.0"),
        ('"Paris"', '{"task": "capital", "content": "Paris"}'),
        ("1/2", "0.5"),
        (r"$\frac{1}{2}$", "0.5"),
        ("1,000", "1000"),
        ("a, b", "b, a"),
        (["Paris", "paris"], ["Paris", "Lutetia"]),
    ],
    ids=[
        "case",
        "number",
        "wrapped, as in iheval",
        "fraction",
        "LaTeX",
        "thousands",
        "order",
        "alternatives",
    ],
)
async def test_another_rows_equal_answer_is_no_wrong_one(answers: tuple[Any, Any]) -> None:
    rows = [row(r"Which? Use \boxed{}.", answer=answer) for answer in answers]
    probes = await probed(rows, lambda row, text: text.startswith(r"\boxed{"))
    assert "another row's answer" in probes.missing


@pytest.mark.parametrize(
    ("answers", "paid", "flags"),
    [
        (("car", "automobile"), lambda row, said: said in ("car", "automobile"), None),
        (("car", "cartwheel"), lambda row, said: said.startswith(row["answer"][:3]), None),
        (("car", "carts"), lambda row, said: said.startswith(row["answer"]), 1),
        (("Paris", "Rome"), lambda row, said: said == row["answer"], 0),
    ],
    ids=["words that mean the same", "a prefix that both have", "a prefix of one", "no defect"],
)
async def test_answers_that_the_environment_holds_for_equal_in_both_rows_are_equal(
    answers: tuple[str, str], paid: Any, flags: int | None
) -> None:
    rows = [row(r"Which? Use \boxed{}.", answer=answer) for answer in answers]
    probes = await probed(
        rows, lambda row, text: paid(row, (re.findall(r"\\boxed\{(.*)\}$", text) or [""])[0])
    )
    given = probes.answers.get("another row's answer")
    assert (None if given is None else len(given.flagged)) == flags


async def test_lists_that_share_an_alternative_lend_each_other_no_wrong_answer() -> None:
    lists = (["France", "Spain"], ["Spain", "Portugal"], ["Portugal", "France"])
    rows = [row(r"Which? Use \boxed{}.", answer=alternatives) for alternatives in lists]
    probes = await probed(rows, lambda row, text: text in [rf"\boxed{{{each}}}" for each in row["answer"]])
    assert {"wrong answer", "another row's answer"} <= probes.missing.keys()


async def test_other_calls_that_are_paid_are_flagged() -> None:
    rows = [row(ground_truth=[{**CALL, "name": name}]) for name in ("send", "stop")]
    any_call = await probed(rows, lambda row, text: text in ("send", "stop"))
    assert len(any_call.answers["another row's answer"].flagged) == 2
    own_call = await probed(rows, lambda row, text: text == row["ground_truth"][0]["name"])
    assert own_call.answers["another row's answer"].flagged == ()


async def test_an_alternative_of_a_list_is_a_right_answer() -> None:
    rows = [row(r"Which? Use \boxed{}.", answer=[town, town.lower()]) for town in ("Paris", "Rome")]
    oracle = await measured(
        rows, lambda row, text: text in [rf"\boxed{{{answer}}}" for answer in row["answer"]]
    )
    assert (oracle.solved, oracle.accepted) == (2, [r"\boxed{item}"])
    assert list(problems(record(oracle))) == []


async def test_rewards_by_chance_solve_nothing() -> None:
    coin = random.Random(0)
    rows = [row(r"Which? Use \boxed{}.", answer=f"town {n}") for n in range(10)]
    oracle = await measured(rows, lambda row, text: coin.random() < 0.5)
    assert (oracle.reason, oracle.solved) == ("rewards change", 0)
    assert list(problems(record(oracle))) == []
    flaky = rows[0]["answer"]
    oracle = await measured(
        rows, lambda row, text: strict(row, text) and (row["answer"] != flaky or coin.random() < 0.5)
    )
    assert (oracle.reason, oracle.solved, [*oracle.missing]) == (None, 9, ["rows"])


async def test_what_the_prompts_ask_for_is_the_form_that_is_paid() -> None:
    """They say `Answer:`, and the environment reads the text of an option, not its letter."""
    asking = row("Which? Say 'Answer: X'.", answer="B", options=[{"A": "one"}, {"B": "two"}])
    alike = {**asking, "options": [{"A": "three"}, {"B": "two"}]}
    for_another_agent = {**asking, "agent_ref": {"name": "another"}}  # counts once
    rows = [asking, for_another_agent, alike]
    oracle = await measured(rows, lambda row, text: text == "Answer: two")
    assert (oracle.asked_for, oracle.solved) == ("Answer: option", 2)
    assert list(problems(record(oracle))) == []


async def test_of_a_large_dataset_only_the_first_rows_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare each of a hundred thousand with all before it takes hours."""
    looked_at: list[Any] = []

    def counted(row: dict[str, Any]) -> Any:
        looked_at.append(row)
        return answer_of(row)

    monkeypatch.setattr(trials, "answer_of", counted)
    rows = [row(r"Use \boxed{}.", answer=f"town {n}") for n in range(1000)]
    assert (await measured(rows, strict)).solved == 10
    assert len(looked_at) < 100


async def test_what_one_prompt_asks_for_and_is_paid_is_tried_in_the_other_rows_too() -> None:
    asking = row("Capital of France? Respond as <town></town>.", answer="Paris")
    silent = row("Capital of Italy?", answer="Rome")
    oracle = await measured([asking, silent], lambda row, text: text == f"<town>{row['answer']}</town>")
    assert (oracle.solved, oracle.unsolved) == (2, ())
    assert oracle.phrasings["<town>answer</town>"].rows == 2


async def test_a_wrong_answer_is_suspect_where_most_rows_that_ask_for_the_same_are_solved() -> None:
    def pay(row: dict[str, Any], text: str) -> bool:
        return text == rf"\boxed{{{row.get('really', row['answer'])}}}"

    wrong = row(r"Capital of Spain? Use \boxed{}.", answer="Lisbon", really="Madrid")
    oracle = await measured([FRANCE, ITALY, wrong], pay)
    assert oracle.suspect == ("row 2",)
    assert [*map(str, problems(record(oracle)))] == [
        "the answer of row 2 ('answer') earns no full reward in any phrasing, those of 2 other rows do"
    ]
    other = row("Write a program for Spain.", answer="Lisbon", really="Madrid")
    oracle = await measured([FRANCE, ITALY, other], pay)
    assert (oracle.unsolved, oracle.suspect) == (("row 2",), ()), "it may ask for another kind of answer"
    assert list(problems(record(oracle))) == []
    oracle = await measured([FRANCE, wrong], pay)
    assert (oracle.unsolved, oracle.suspect) == (("row 1",), ()), "one of two tells nothing"
