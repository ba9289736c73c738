"""The records that ship with gymgate say something of every environment of the release."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from gymgate.cli import cli
from gymgate.core.config import RuntimeConfig
from gymgate.gym.runtime import open_catalog
from gymgate.quality import CheckResult
from gymgate.quality.known import known
from gymgate.quality.record.findings import dismissals, problems, proofs, solvable
from gymgate.quality.record.storage import shipped_records

ROOT = Path(__file__).parents[2]
RELEASE = "0.7.0"
RECORDS = [record for record in shipped_records() if record.nemo_gym == RELEASE]


def test_every_environment_has_one() -> None:
    catalog = open_catalog(RuntimeConfig(version=RELEASE), progress=print)
    shipped = {each.known_as for each in (*catalog.environments(), *catalog.agents())}
    assert {f"{record.kind}/{record.environment}" for record in RECORDS} == shipped


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_whatever_is_no_match_says_why(record: CheckResult) -> None:
    assert record.verdict != "failed", "something of the machine that checked it"
    if record.verdict != "match":
        assert len(record.detail) > 5
    if record.verdict == "differs":
        assert record.detail in known()["causes"].values(), "an older reading of it"
        assert record.rows or record.evidence
    if record.verdict == "blocked":
        assert record.need
        assert re.match(r"[a-z]+: \S", record.detail)
    assert "\x1b" not in record.model_dump_json()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_its_rows_were_read(record: CheckResult) -> None:
    data = record.data
    assert data is not None
    assert (data.duplicates is None) == ("duplicates" in data.missing)
    assert (data.answers_in_prompt is None) == ("answers_in_prompt" in data.missing)
    assert (data.shared is None) == ("shared" in data.missing)
    if record.shape is not None:
        assert record.shape.rows <= sum(data.files.values()), "raw rows are read too"


def test_at_least_forty_environments_are_shown_to_be_solvable() -> None:
    solvable = [each for each in RECORDS if each.oracle and each.oracle.rows == each.oracle.solved > 0]
    assert len(solvable) >= 40


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_right_answers_were_tried_or_it_says_why_not(record: CheckResult) -> None:
    if record.measured:
        assert record.oracle is not None
    if record.oracle is not None:
        assert (record.oracle.reason is None) == (record.oracle.rows > 0)
        assert (record.oracle.reason == "other") == bool(record.oracle.detail)


@pytest.mark.parametrize("record", [each for each in RECORDS if each.policy], ids=lambda record: record.name)
def test_a_difficulty_is_of_every_rollout_and_says_how_it_was_sampled(record: CheckResult) -> None:
    policy = record.policy
    assert policy is not None
    assert policy.pass_at_1 is not None
    assert policy.scored == policy.rows * policy.repeats
    assert policy.sampling.keys() >= {"temperature", "max_tokens"}


def test_a_proof_belongs_to_flags() -> None:
    """What was read in a grader's code is of a probe that flagged it."""
    flags = {
        (f"{record.kind}/{record.environment}", flag.probe, flag.proof is None)
        for record in RECORDS
        for flag in problems(record)
        if flag.probe is not None
    }
    for proof in proofs():
        assert proof.line > 0
        assert {(name, probe, False) for name in proof.environments for probe in proof.probes} <= flags, proof


def test_a_reason_stands_only_with_answers_that_would_earn_something_else_if_it_were_false() -> None:
    assert all(bool(proof.reason) == bool(proof.counter) for proof in proofs())
    assert len([proof for proof in proofs() if proof.reason]) >= 10
    for proof in proofs():
        assert all(witness.expected is not None for witness in proof.counter)
        assert len({(witness.row, witness.answer) for witness in proof.counter}) == len(proof.counter)


@pytest.mark.gym
def test_what_is_documented_stands_in_the_release_at_that_line_and_so_does_the_graders_code() -> None:
    site = open_catalog(RuntimeConfig(version=RELEASE), progress=print).site
    for proof in proofs():
        if (quote := proof.documented) is not None:
            assert quote.text in (site / quote.file).read_text().splitlines()[quote.line - 1], quote
        if (path := site / proof.file).exists():  # reasoning_gym is installed apart
            assert path.read_text().splitlines()[proof.line - 1].strip(), proof


def test_a_dismissed_flag_feeds_no_number_and_a_recorded_solve_counts() -> None:
    shown = {f"{record.kind}/{record.environment}": solvable(record) for record in RECORDS}
    dismissed = {name for each in dismissals() if "right answer" in each.probes for name in each.environments}
    assert {name: shown[name] for name in dismissed} == {
        "benchmarks/litmus-bench": None,
        "resources_servers/image_tools": (2, 5),
        "resources_servers/gui_coordinate": None,
        "resources_servers/math_advanced_calculations": None,
    }
    assert shown["resources_servers/nvarc"] == (5, 5), "its recorded answers earned 1, 1, 1, 1, 1"
    assert shown["resources_servers/iheval"] == (4, 5)
    assert all(0 < least <= rows for least, rows in filter(None, shown.values()))


def test_needs_and_licences_are_the_same_wherever_they_are_shown() -> None:
    listed = json.loads(CliRunner().invoke(cli, ["list", "--json"]).output)
    page = (ROOT / "docs" / "environments-status.md").read_text()
    catalog = open_catalog(RuntimeConfig(version=RELEASE), progress=print)
    for item in listed:
        environment = catalog.find(f"{item['kind']}/{item['name']}")
        assert {need["kind"] for need in item["needs"]} <= {*environment.need_kinds}
        assert ("data" in environment.need_kinds) == item["needs_data"]
        (line,) = re.findall(rf"^\| `(?:{item['kind']}/)?{re.escape(item['name'])}` \|.*", page, re.M)[
            -1:
        ] or [""]
        if f"`{item['kind']}/{item['name']}`" in line or item["kind"] == "resources_servers":
            assert f" | {', '.join(environment.need_kinds) or 'none'} | " in line
    shown = CliRunner().invoke(cli, ["info", "swemer_v1"]).output
    assert "NVIDIA Internal Use Only, Do Not Distribute" in shown


def test_info_shows_them() -> None:
    shown = CliRunner().invoke(cli, ["info", "calendar"]).output
    assert "\nchecked 20" in shown
    assert " with nemo-gym 0.7.0 (" in shown
    assert "\n  verdict: match, 5 of 5 recorded rewards\n" in shown
    assert "docs/" not in shown
    assert "\n  rows: 5 rows; duplicates: 0; " in shown
    shown = CliRunner().invoke(cli, ["info", "mcqa"]).output
    assert re.search(r"\n  right answer: .*\\boxed\{answer\}; at least 10 of 10 rows ", shown)
    assert re.search(
        r"\n  model: SmolLM2\S+, .*temperature 1: 0.000 ± 0.000 over 10 rollouts of 5 rows\n", shown
    )
