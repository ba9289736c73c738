"""The rows and the picture of `python -m benchmarks curve`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.curve import errors, value
from benchmarks.curve_picture import draw, running_mean
from benchmarks.curve_rows import make_rows, prompt, subject


def test_no_prompt_and_no_word_is_in_both_files(tmp_path: Path) -> None:
    trained, held_out = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in make_rows("word_forms", 320, 160, tmp_path)
    )
    assert (len(trained), len(held_out)) == (320, 160)
    assert len({prompt(row) for row in trained + held_out}) == 480
    assert not {subject(row) for row in trained} & {subject(row) for row in held_out}
    assert len({row["expected_answer"] for row in held_out}) > 150  # no constant answer scores


def test_too_few_rows_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"word_forms.*489.*400 \+ 160"):
        make_rows("word_forms", 400, 160, tmp_path)


def test_spelling(tmp_path: Path) -> None:
    rows = [
        json.loads(line)
        for path in make_rows("word_forms", 320, 160, tmp_path)
        for line in path.read_text().splitlines()
    ]
    answers = {row["responses_create_params"]["input"][-1]["content"]: row["expected_answer"] for row in rows}
    assert answers["What is the -ing form of bake?"] == "baking"
    assert answers["What is the past tense of bake?"] == "baked"
    assert answers["What is the comparative of large?"] == "larger"
    assert answers["What is the plural of horse?"] == "horses"


def test_the_improvement_counts_both_standard_errors() -> None:
    before, after = {"mean": 0.2, "standard_error": 0.03}, {"mean": 0.45, "standard_error": 0.04}
    assert errors(before, after) == pytest.approx(5.0)
    equal = {"mean": 1.0, "standard_error": None}
    assert errors(before, equal) is None
    assert value(equal) == "1.000 ± n/a"


def test_the_picture_is_svg() -> None:
    measured = {"mean": 0.5, "standard_error": 0.1}
    picture = draw(
        {
            "settings": {"set": "word_forms"},
            "start": {"before": measured, "best_constant": 0.1},
            "seeds": [
                {"seed": 0, "training_rewards": [0.1, 0.3], "after": measured},
                {"seed": 1, "training_rewards": [0.1, 0.3], "after": {"mean": 1.0, "standard_error": None}},
            ],
        }
    )
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert running_mean([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
