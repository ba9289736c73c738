"""What rows show without a server: equal rows, answers that prompts give away, rows in two splits; and no false alarms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gymgate.gym.catalog import DataFile, Dataset
from gymgate.quality import CheckResult
from gymgate.quality.model import Thresholds
from gymgate.quality.record.findings import findings, unmet_thresholds
from gymgate.quality.record.row_quality import NO_TASK, SHOWN, measure, split_of
from gymgate.quality.sections import Data


def row(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": prompt}]}, **fields}


def data_of(directory: Path, **files: list[Any]) -> Data:
    """Measure files of these rows."""
    found = []
    for name, rows in files.items():
        (path := directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        found.append(DataFile(name, path, "rows"))
    return measure(found)


def noticed(data: Data) -> list[str]:
    about = {"environment": "e", "kind": "config", "nemo_gym": "0.7.0", "gymgate": "0", "date": "d"}
    record = CheckResult.model_validate({**about, "verdict": "match", "data": data})
    found = [*map(str, findings(record))]
    assert list(unmet_thresholds(record, Thresholds(clean_rows=True))) == [
        f"--clean-rows: {each}" for each in found
    ]
    return found


FRANCE = row("What is the capital of France?", answer="Paris")
ITALY = row("What is the capital of Italy?", answer="Milan and Rome")


def test_clean_rows_have_no_findings(tmp_path: Path) -> None:
    data = data_of(tmp_path, train=[FRANCE], validation=[ITALY])
    assert (data.duplicates, data.answers, data.answers_in_prompt, data.shared) == (0, 2, 0, 0)
    assert data.splits == {"train": "train", "validation": "validation"}
    assert noticed(data) == []
    assert str(data) == "2 rows; duplicates: 0; answers in prompts: 0 of 2; rows in several splits: 0"


def test_duplicated_rows_are_found(tmp_path: Path) -> None:
    """Whatever the order of their keys, and the fields that NeMo Gym adds."""
    again = {"_ng_task_index": 7, **dict(reversed(FRANCE.items()))}
    data = data_of(tmp_path, example=[FRANCE, ITALY, again, ITALY, FRANCE])
    assert data.duplicate_rows == (("example:1", "example:3", "example:5"), ("example:2", "example:4"))
    assert noticed(data) == [
        "3 of 5 rows equal an earlier row of their file: example:1 = example:3 = example:5; example:2 = example:4"
    ]


def test_rows_that_differ_in_anything_are_no_duplicates_nor_are_examples_copied_from_another_file(
    tmp_path: Path,
) -> None:
    seeds = [{**FRANCE, "seed": seed} for seed in range(3)]
    assert noticed(data_of(tmp_path, train=seeds, example=[seeds[0], {**FRANCE, "answer": 1}])) == []


def test_rows_of_an_environment_that_makes_the_task_are_no_duplicates(tmp_path: Path) -> None:
    start = row("Deal me in.", agent_ref={"name": "dealer"}, _ng_task_index=0)
    data = data_of(tmp_path, example=[start] * 5)
    assert (data.duplicates, data.missing["duplicates"]) == (None, NO_TASK)
    assert noticed(data) == []
    assert data_of(tmp_path, example=[start] * 5, other=[FRANCE, FRANCE]).duplicates == 1


@pytest.mark.parametrize(
    "prompt",
    [
        "What is the capital of Spain? The answer is Madrid.",
        "Capital of Spain?\nAnswer: Madrid",
        "Capital of Spain? (answer: madrid)",
        'Reply in JSON. {"question": "capital of Spain", "expected_answer": "Madrid"}',
        "Capital of Spain? <answer>Madrid</answer>",
        r"Capital of Spain? Put it in \boxed{}. The solution: $\boxed{Madrid}$",
        "Capital of Spain?\n**Ground truth:** Madrid\nThink first.",
    ],
)
def test_a_prompt_that_says_its_answer_is_found(tmp_path: Path, prompt: str) -> None:
    data = data_of(tmp_path, example=[FRANCE, ITALY, row(prompt, answer="Madrid")])
    assert noticed(data) == ["the prompt says the row's own answer in 1 of 3 rows: example:3"]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Which city is larger, Madrid or Seville?", "Madrid"),
        ("Options: A) Madrid B) Seville. Answer with the letter.", "A"),
        ("Possible answers: Madrid, Seville", "Madrid"),
        ("Answer: Madrid or Seville?", "Madrid"),
        ("Madrid is the capital of Spain. What is the capital of Spain?", "Madrid"),
        ("The answer is 42. Is it?", "42"),
        ("The answer is yes.", "yes"),
        ("Answer: A", "A"),
        ("Is the answer correct? The answer is correct.", "correct"),
        ("Grade this. The student's answer: Madrid", "Madrid"),
        ("If the answer is Madrid, write <answer>Madrid</answer>.", "Madrid"),
        ("For example, the answer is Madrid.", "Madrid"),
        ("The answer is not Madrid.", "Madrid"),
        ("The answer is Madrid-Barajas.", "Madrid"),
    ],
)
def test_an_answer_that_merely_stands_in_its_prompt_is_no_finding(
    tmp_path: Path, prompt: str, answer: str
) -> None:
    assert noticed(data_of(tmp_path, example=[FRANCE, ITALY, row(prompt, answer=answer)])) == []


def test_an_instruction_that_stands_in_other_prompts_too_is_no_finding(tmp_path: Path) -> None:
    """It would say the answer of the row that it happens to fit. Labels are answers of several prompts."""
    shown = 'Answer: "both of them"\nWhich one is left of the '
    rows = [row(f"{shown}square?", target="both of them"), row(f"{shown}circle?", target="the triangle")]
    data = data_of(tmp_path, example=rows)
    assert (data.answers, data.answers_in_prompt) == (2, 0)
    shots = [row(f"Answer: positive\nReview {n}: ...", answer="positive") for n in range(2)]
    data = data_of(tmp_path, example=[*shots, FRANCE, ITALY])
    assert (data.answers, data.answers_in_prompt) == (2, 0)


def test_one_prompt_alone_cannot_be_told_from_an_instruction(tmp_path: Path) -> None:
    data = data_of(tmp_path, example=[row("The answer is Madrid.", answer="Madrid")])
    assert (data.answers_in_prompt, "answers_in_prompt" in data.missing) == (None, True)


def test_a_row_in_two_splits_is_found(tmp_path: Path) -> None:
    """Examples are no split, and the agent does not make another row of it."""
    other = {**FRANCE, "agent_ref": {"name": "another"}}
    data = data_of(tmp_path, train=[ITALY, FRANCE], my_test=[other], example=[FRANCE, ITALY])
    assert data.shared_rows == (("train:2", "my_test:1"),)
    assert noticed(data) == ["rows in several splits: 1: train:2 = my_test:1"]
    data = data_of(tmp_path, train=[ITALY, FRANCE], example=[FRANCE, ITALY])
    assert (data.shared, "one split" in data.missing["shared"]) == (None, True)


def test_without_packaged_rows_that_is_why_each_figure_is_missing() -> None:
    missing = measure([]).missing
    assert [*missing] == ["duplicates", "answers_in_prompt", "shared"]
    assert len({*missing.values()}) == 1


def test_the_type_of_a_declared_dataset_says_the_split_before_the_files_name() -> None:
    file = DataFile("a_train", Path("/x/data/a_train.jsonl"), "rows")
    assert split_of(file, ()) == "train"
    assert split_of(file, [Dataset("a", "validation", "data/a_train.jsonl")]) == "validation"
    both = [Dataset("a", kind, "data/a_train.jsonl") for kind in ("benchmark", "example")]
    assert split_of(file, both) is None
    assert split_of(DataFile("x", Path("/x/data/train_example.jsonl"), "rows"), ()) is None


def test_rows_of_any_shape_are_read(tmp_path: Path) -> None:
    strange = [3, [], {}, {"responses_create_params": {"input": [3, None]}, "answer": "Paris"}, FRANCE]
    data = data_of(tmp_path, example=strange)
    assert data.files == {"example": 3}
    (path := tmp_path / "broken.jsonl").write_bytes(b'{"a": 1}\n\n{"a"\n\xff\n')
    assert measure([DataFile("broken", path, "raw")]).files == {"broken": 1}


def test_many_findings_are_counted_and_some_listed(tmp_path: Path) -> None:
    rows = [row(f"Town {n}? The answer is Town{n * 'x'}.", answer=f"Town{n * 'x'}") for n in range(1, 40)]
    data = data_of(tmp_path, train=rows + rows, test=rows)
    assert (data.duplicates, data.answers_in_prompt, data.shared) == (39, 3 * 39, 39)
    assert {len(data.duplicate_rows), len(data.rows_with_answer), len(data.shared_rows)} == {SHOWN}
