"""Faults planted in an environment of our own, on its real servers: each is found. (A judge that changed its mind and a
verifier that got stricter: test_rescore.py.)"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from gymgate.quality import CheckResult
from gymgate.quality.record.findings import problems
from gymgate.quality.record.storage import load_record, record_path
from support.checks import PARIS
from support.faulty import with_recordings
from support.upstream import scripted_chat

pytestmark = [
    pytest.mark.gym,
    pytest.mark.warm,
    pytest.mark.timeout(900),
]  # the first use of a release installs it

NAME = "config/faulty-0.7.0"
BOX = r"\boxed{answer}"
TOWNS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid"}


def planted(
    directory: Path,
    keys: Iterable[tuple[str, str]] = tuple(TOWNS.items()),
    *,
    paid: str = BOX,
    hint: str = "",
) -> Path:
    """The config of an environment that asks for towns in a box, with these answers in its rows. Its verifier pays the right
    town in the phrasing `paid`, whatever the row's answer is. `hint` stands in the first prompt."""
    config = with_recordings(directory, PARIS)
    rows = [
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": rf"Capital of {land}?{hint * (not n)} Use \boxed{{}}."}]
            },
            "wanted": paid.replace("answer", TOWNS[land]),
            "expected_answer": answer,
        }
        for n, (land, answer) in enumerate(keys)
    ]
    (config.parents[1] / "data" / "example.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return config


def check(config: Path, *options: str) -> tuple[str, CheckResult]:
    """What `gymgate check` with these options prints of the environment, and its record."""
    store = config.parents[3] / "records"
    command = [sys.executable, "-m", "gymgate", "check", str(config), "--record", str(store), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    record = load_record(record_path(store, NAME))
    assert record is not None, done.stderr
    return done.stdout, record


def kinds(record: CheckResult) -> list[str]:
    return [finding.kind for finding in problems(record)]


def test_an_environment_without_a_fault_pays_every_right_answer(tmp_path: Path) -> None:
    _, record = check(planted(tmp_path), "--section", "oracle")
    assert record.oracle is not None, record.missing
    assert (record.oracle.solved, record.oracle.accepted, record.oracle.asked_for) == (3, [BOX], BOX)
    assert kinds(record) == []
    assert (record.cost, record.probes) == (None, None)


def test_a_wrong_answer_key_is_found(tmp_path: Path) -> None:
    shown, record = check(planted(tmp_path, {**TOWNS, "Spain": "Lisbon"}.items()), "--section", "oracle")
    assert kinds(record) == ["answer suspect"]
    assert "row 2" in shown


def test_a_phrasing_trap_is_found(tmp_path: Path) -> None:
    shown, record = check(planted(tmp_path, paid="Answer: answer"), "--section", "oracle")
    assert kinds(record) == ["right answer rejected"]
    assert BOX in shown
    assert "Answer: answer" in shown


def test_an_answer_in_the_prompt_is_found(tmp_path: Path) -> None:
    shown, record = check(planted(tmp_path, hint=" The answer is Paris."), "--rows-only")
    assert kinds(record) == ["answer in prompt"]
    assert "example:1" in shown


def test_duplicated_rows_are_found(tmp_path: Path) -> None:
    shown, record = check(planted(tmp_path, [*TOWNS.items(), ("Spain", "Madrid")]), "--rows-only")
    assert kinds(record) == ["duplicates"]
    assert "example:3 = example:4" in shown


def test_a_probe_shows_each_answer_that_a_grader_wrongly_pays(tmp_path: Path) -> None:
    """The verifier looks for the town anywhere in the answer. Nothing is replayed."""
    config = planted(tmp_path, paid="answer")
    command = [
        sys.executable,
        "-m",
        "gymgate",
        "check",
        str(config),
        "--probe",
        "negated",
        "--probe",
        "wrong answer",
    ]
    artifact = tmp_path / "autoqc_artifact.json"
    command += ["--no-flags", "--artifact", str(artifact)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 1, done.stderr
    assert r"row 0: '\\boxed{not Paris}' earns 1" in done.stdout
    assert "suspicion (negated)" in done.stdout
    assert "wrong answer: no flag" in done.stdout
    assert [line for line in done.stderr.splitlines() if "threshold not met: --no-flags: " in line]
    written = json.loads(artifact.read_text())
    assert (written["kind"], written["environment"], written["passed"]) == ("config", "faulty", False)
    answers = written["metrics"]["probes"]["answers"]
    assert {name: len(each.get("flagged", ())) for name, each in answers.items()} == {
        "negated": 3,
        "wrong answer": 0,
    }
    assert ([each["probe"] for each in written["suspicions"]], written["findings"]) == (["negated"], [])
    assert (written["thresholds"], len(written["unmet"])) == ({"no_flags": True}, 1)


def test_a_section_is_added_to_the_record_that_is_there(tmp_path: Path) -> None:
    """The model of -b gets each row twice; what was measured before stays, and nothing is replayed."""
    config = planted(tmp_path)
    _, before = check(config, "--section", "oracle", "--section", "shape")
    with scripted_chat(lambda asked: r"\boxed{Paris}" if "France" in asked else "?") as url:
        model = ("-b", url, "-m", "scripted", "-r", "2", "--sampling", "temperature=0.5")
        shown, after = check(config, "--section", "policy", *model)
    assert "scripted, temperature 0.5: 0.333 ± 0.333 over 6 rollouts of 3 rows" in shown
    assert after.policy is not None
    assert (after.policy.sampling, after.policy.repeats) == ({"temperature": 0.5}, 2)
    unchanged = {"policy", "settings"}
    assert after.model_dump(exclude=unchanged) == before.model_dump(exclude=unchanged)
