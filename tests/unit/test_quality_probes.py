"""The probes on graders of our own: every planted defect is flagged, and no honest grader is."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from gymgate.core import codec
from gymgate.quality import CheckResult
from gymgate.quality.model import Thresholds
from gymgate.quality.record import findings as findings_module
from gymgate.quality.record import probes, trials
from gymgate.quality.record.artifact import artifact
from gymgate.quality.record.findings import Proof, findings, problems, suspicions, unmet_thresholds
from gymgate.quality.sections import (
    ANSWERS,
    OF_ORACLE,
    PROBE_TEXTS,
    WITHOUT_ANSWER,
    FlaggedRow,
    ProbeName,
    ProbeRewards,
    Probes,
)
from support.graders import (
    CLEAN,
    LETTERS,
    PLANTED,
    TOWNS,
    Grader,
    Row,
    Scored,
    boxes,
    honest,
    recorded_answer,
    row,
)


async def checked(rows: list[Row], grader: Grader, *names: str) -> CheckResult:
    context: Any = Scored(rows, grader)
    context.request.probes = names
    about = {"environment": "e", "kind": "config", "nemo_gym": "0.7.0", "gymgate": "0", "date": "d"}
    right = await trials.measure_right_answers(context)
    return CheckResult(**about, verdict="match", oracle=right, probes=await trials.measure(context))


def flagged(record: CheckResult) -> set[str]:
    assert record.probes is not None
    return {name for name, rewards in record.probes.answers.items() if rewards.flagged} - {*ANSWERS}


def test_the_table_has_every_probe_once() -> None:
    names = [probe.name for probe in probes.PROBES]
    assert [*PROBE_TEXTS] == [*get_args(ProbeName)]
    assert [*OF_ORACLE, *names].__len__() == len({*OF_ORACLE, *names}) == len(PROBE_TEXTS)
    assert {probe.name for probe in probes.PROBES if probe.of != "solved row"} == WITHOUT_ANSWER


@pytest.mark.parametrize("name", PLANTED)
async def test_a_planted_defect_is_flagged_by_the_probes_for_it(name: str) -> None:
    rows, grader, expected = PLANTED[name]
    record = await checked(rows, grader)
    assert flagged(record) == expected
    assert {flag.probe for flag in suspicions(record)} >= expected
    assert list(findings(record)) == []


def test_every_probe_finds_a_planted_defect() -> None:
    constant = {"empty", "fixed sentence", "the prompt", "another row's best"}
    assert (
        set().union(*(expected for _, _, expected in PLANTED.values()))
        == {*PROBE_TEXTS} - OF_ORACLE - constant
    )


@pytest.mark.parametrize("name", CLEAN)
async def test_an_honest_grader_is_not_flagged(name: str) -> None:
    rows, grader = CLEAN[name]
    record = await checked(rows, grader)
    assert record.oracle is not None
    assert (name == "programs") == (record.oracle.reason is not None)
    assert [*map(str, problems(record))] == []
    unmet = list(unmet_thresholds(record, Thresholds(no_flags=True)))
    assert unmet == (["--no-flags: not measured: answer is a program or patch"] if name == "programs" else [])


async def test_equal_answers_alternatives_and_chance_are_no_flags() -> None:
    def synonyms(row: Row, text: str) -> bool:
        return text.casefold() in (r"\boxed{car}", r"\boxed{automobile}")

    words = [row(r"Which? Use \boxed{}.", answer=answer) for answer in ("car", "automobile")]
    assert "wrong answer" not in flagged(await checked(words, synonyms))
    lists = [row(r"Which? Use \boxed{}.", answer=[town, town.upper()]) for town in ("Paris", "Rome")]
    alternatives = await checked(lists, lambda row, text: honest({"answer": row["answer"][0]}, text))
    assert [*map(str, problems(alternatives))] == []
    coin = random.Random(1)
    many = [{**town, "copy": copy} for copy in range(3) for town in TOWNS]
    chance = await checked(many, lambda row, text: coin.random() < 0.5)
    assert chance.oracle is not None
    assert (flagged(chance), chance.oracle.reason) == (set(), "rewards change")


async def test_what_is_paid_once_and_not_again_is_no_flag() -> None:
    paid: set[str] = set()

    def at_first(row: Row, text: str) -> bool:
        is_new = text not in paid
        paid.add(text)
        return honest(row, text) or is_new

    assert flagged(await checked(TOWNS, at_first)) == set()


async def test_a_row_that_pays_any_letter_is_flagged_once() -> None:
    record = await checked(LETTERS, lambda row, text: True)
    assert flagged(record) == {"wrong answer", "made-up answer"}


async def test_probes_are_said_in_the_forms_of_prompts_and_recordings() -> None:
    """A grader that is honest in the form of its prompts, and reads the last word of the box that a recording has."""
    rows = [row("Which? Say 'Answer: X'.", answer=letter) for letter in "BCA"]

    def pay(row: Row, text: str) -> bool:
        return text == f"Answer: {row['answer']}" or text.endswith(
            (f"{{{row['answer']}}}", f" {row['answer']}}}")
        )

    context: Any = Scored(rows, pay)
    assert not (await trials.measure(context)).answers["negated"].flagged
    context.oracle, context.recorded = None, (recorded_answer(1.0, r"It is \boxed{B}"),)
    context.results = (SimpleNamespace(verdict="incomplete"),)  # its row cannot be run again
    negated = (await trials.measure(context)).answers["negated"]
    assert [flag.answer for flag in negated.flagged] == [rf"\boxed{{not {letter}}}" for letter in "BCA"]
    assert (negated.rows, negated.failed, negated.above_zero, negated.mean) == (3, 0, 3, 0.5)


async def test_what_is_paid_without_asking_the_judge_is_a_flag() -> None:
    def is_paid(row: Row, text: str) -> bool:
        return honest(row, text) or any(rf"\({row['answer']}\)" in each for each in boxes(text))

    asks = Scored(TOWNS, is_paid, judges=lambda text: not any(is_paid(row, text) for row in TOWNS))
    measured = await trials.measure(cast("Any", asks))
    assert [len(measured.answers[name].flagged) for name in ("negated", "refusal")] == [3, 3]
    assert {"format alone", "made-up answer", "empty"} <= measured.missing.keys()


@pytest.mark.parametrize(("paid", "is_flagged"), [(0.5, True), (0.49, False)])
async def test_half_of_the_right_answers_reward_is_a_flag(paid: float, is_flagged: bool) -> None:
    record = await checked(
        TOWNS, lambda row, text: float(honest(row, text)) or paid * ("not" in text), "negated"
    )
    assert flagged(record) == ({"negated"} if is_flagged else set())
    assert [("half" in str(flag)) for flag in problems(record)] == [True] * is_flagged


async def test_a_single_probe_runs_alone() -> None:
    record = await checked(*PLANTED["negation"][:2], "negated")
    assert record.probes is not None
    assert [*record.probes.answers] == ["negated"]
    first = record.probes.answers["negated"].flagged[0]
    assert (first.row, first.answer, first.reward, first.right) == ("row 0", r"\boxed{not Paris}", 1.0, 1.0)
    (flag,) = problems(record)
    assert (flag.probe_kind, flag.witness) == ("lenient", first)


async def test_a_single_probe_gives_the_counter_witnesses_of_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    witness = FlaggedRow(row="row 1", answer=r"\boxed{Rome, not}", expected=1.0)
    about = {
        "environments": ("config/e",),
        "nemo_gym": "0.7.0",
        "file": "app.py",
        "line": 7,
        "counter": (witness,),
    }
    read = (Proof(probes=("negated",), **about), Proof(probes=("case",), **about))  # type: ignore[arg-type]
    monkeypatch.setattr(trials, "proofs", lambda: read)
    record = await checked(*PLANTED["negation"][:2], "negated")
    assert record.probes is not None
    (tried,) = record.probes.answers["negated"].counter
    assert (tried.row, tried.reward, tried.expected) == ("row 1", 0.0, 1.0), (
        "the reason is false, and that shows"
    )


@pytest.mark.parametrize(
    ("shown", "options"), [(True, " One of red, blue, green."), (False, ""), (False, " Is it red, say?")]
)
async def test_a_list_of_options_is_exploitable_where_the_prompt_shows_them(
    shown: bool, options: str
) -> None:
    """The right one alone in a prompt is no list."""
    rows = [
        row(rf"Which? Use \boxed{{}}.{options.replace('red, say', each)}", answer=each)
        for each in ("red", "blue", "green")
    ]

    def finds(row: Row, text: str) -> bool:
        return row["answer"] in text

    record = await checked(rows, finds, "every option")
    (flag,) = [flag for flag in problems(record) if flag.probe == "every option"]
    assert flag.probe_kind == ("exploitable" if shown else "lenient")
    assert ("on average" in flag.text) == shown


async def test_a_flag_does_not_meet_the_gate() -> None:
    record = await checked(*PLANTED["negation"][:2])
    (unmet,) = unmet_thresholds(record, Thresholds(no_flags=True))
    assert "negated" in unmet


async def test_a_flag_is_a_finding_once_the_code_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await checked(*PLANTED["negation"][:2])
    assert ([*findings(record)], [each.probe for each in suspicions(record)]) == ([], ["negated"])
    proof = Proof(
        environments=("config/e",),
        nemo_gym="0.7.0",
        probes=("negated",),
        file="app.py",
        line=7,
        reason="drops 'not'",
    )
    other = proof.model_copy(update={"nemo_gym": "0.6.0"})
    monkeypatch.setattr(findings_module, "proofs", lambda: (other,))
    assert [*findings(record)] == [], "of another release"
    monkeypatch.setattr(findings_module, "proofs", lambda: (proof,))
    [finding] = findings(record)
    assert (finding.proof, [*suspicions(record)]) == (proof, [])
    assert "app.py:7" in finding.label
    own: Any = SimpleNamespace(path=tmp_path)
    written = artifact(record, own, Thresholds(), [])
    assert (written["suspicions"], [each["probe"] for each in written["findings"]]) == ([], ["negated"])
    monkeypatch.setattr(findings_module, "dismissals", lambda: (proof,))
    assert [*problems(record)] == [], "an error of the probe"


async def test_an_artifact_holds_the_row_that_shows_a_flag(tmp_path: Path) -> None:
    record = await checked(*PLANTED["negation"][:2], "negated")
    own: Any = SimpleNamespace(path=tmp_path)
    written = codec.loads(codec.dumps(artifact(record, own, Thresholds(no_flags=True), ["unmet"])))
    (flag,) = written["suspicions"]
    assert (flag["probe"], flag["probe_kind"], flag["witness"]["row"]) == ("negated", "lenient", "row 0")
    assert flag["witness"]["answer"] == r"\boxed{not Paris}"


def test_wrong_answers_are_of_the_same_kind() -> None:
    options = row(answer="A", options=[{"A": "one"}, {"B": "two"}, {"C": "three"}])
    assert probes.wrong_answers(options, "A", "answer") == ("B", "C")
    assert probes.wrong_answers(options, "two", "option") == ("one", "three")
    assert probes.wrong_answers(options, "Yes", "answer") == ("No",)
    assert probes.wrong_answers(row(answer="true"), "true", "answer") == ("false",)
    assert probes.wrong_answers(row(answer="x"), "some words", "answer") == ()


@pytest.mark.parametrize(
    ("right", "said"), [("1/4", ["0.25"]), ("0.25", ["1/4"]), ("1/3", []), ("12", ["12.0"]), ("3", [])]
)
def test_a_number_in_another_notation_is_the_same_number(right: str, said: list[str]) -> None:
    [probe] = [each for each in probes.PROBES if each.name == "notation"]
    assert probe.answers(probes.Subject(trials.ReplayCase("row 0", row(answer=right), trials._empty))) == said


def rollout(prompt: str, reward: float | None, said: str) -> Any:
    turns = [[{"type": "message", "role": "assistant", "content": said}]]
    return SimpleNamespace(row=row(prompt), recording=SimpleNamespace(reward=reward, turns=turns))


def test_another_rows_best_is_the_best_of_the_others() -> None:
    recorded = [
        rollout("a", 1.0, "own"),
        rollout("b", 0.2, "weak"),
        rollout("c", 0.8, "best"),
        rollout("d", 0.0, "no"),
    ]
    assert trials._best_answer(row("a"), recorded) == "best"
    assert trials._best_answer(row("c"), recorded) == "own"
    assert trials._best_answer(row("a"), recorded[:1]) == ""
    assert trials._best_answer(row("a"), recorded[3:]) == "", "it earned nothing"


def test_each_row_is_tried_once_and_none_that_lacks_what_scoring_needs() -> None:
    recorded = [rollout(prompt, 1.0, "x") for prompt in "abab"]
    context: Any = SimpleNamespace(
        recorded=recorded,
        results=[SimpleNamespace(verdict="match"), SimpleNamespace(verdict="incomplete")],
        rows=[row("c"), {**row("c"), "agent_ref": {"name": "its_agent"}}, row("a")],
        replay_of=lambda each: trials.ReplayCase("recorded", each.row, trials._empty),
    )
    assert [probes.prompt_of(each.row["responses_create_params"]) for each in trials._rows(context)] == [
        "a",
        "b",
        "c",
    ]
    context.recorded = recorded[:2]
    assert [probes.prompt_of(each.row["responses_create_params"]) for each in trials._rows(context)] == [
        "a",
        "c",
    ]


def test_a_row_that_pays_half_for_any_answer_still_shows_what_it_pays_in_full() -> None:
    def paid(**rows: float) -> ProbeRewards:
        flags = tuple(FlaggedRow(row=row, answer="x", reward=reward) for row, reward in rows.items())
        return ProbeRewards(rows=3, failed=0, mean=0.5, highest=1.0, above_zero=3, flagged=flags)

    left = trials.without_echoes(
        {"another row's answer": paid(one=0.5, two=1.0), "refusal": paid(one=1.0, two=1.0, three=1.0)}
    )
    assert {name: [flag.row for flag in rewards.flagged] for name, rewards in left.items()} == {
        "another row's answer": ["one", "two"],
        "refusal": ["one", "three"],
    }


def test_a_count_leaves_no_paid_row_out_unsaid() -> None:
    flags = tuple(FlaggedRow(row=f"row {n}", answer="x", reward=1.0, right=1.0) for n in range(3))
    rewards = ProbeRewards(rows=4, failed=0, mean=1.0, highest=1.0, above_zero=4, flagged=flags)
    about = {"environment": "e", "kind": "config", "nemo_gym": "0.7.0", "gymgate": "0", "date": "d"}
    probed = Probes(
        answers={
            "another row's answer": rewards,  # a row that pays some of it has no flag
            "negated": rewards,
            "refusal": rewards.model_copy(update={"flagged": flags[:2]}),
        }
    )
    texts = [
        each.text
        for each in findings_module.flagged_probes(CheckResult(**about, verdict="match", probes=probed))
    ]
    assert ["at least 2 of 4" in text for text in texts] == [False, False, True]
    assert "at least" not in texts[0] + texts[1].replace("at least half", "")


async def test_a_witness_is_the_whole_answer_or_says_that_it_is_cut() -> None:
    async def witness(length: int) -> str:
        rows = [row(r"Which? Use \boxed{}.", answer=letter * length) for letter in "abc"]
        record = await checked(rows, lambda row, text: row["answer"] in text, "negated")
        assert record.probes is not None
        return record.probes.answers["negated"].flagged[0].answer

    whole = rf"\boxed{{not {'a' * 330}}}"
    assert (await witness(330), (await witness(3000))[-2:]) == (whole, "a…")
