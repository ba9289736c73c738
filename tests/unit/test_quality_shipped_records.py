"""The records that ship with gymgate say something of every environment of the release."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from gymgate.cli import cli
from gymgate.core.config import RuntimeConfig
from gymgate.gym.runtime import open_catalog
from gymgate.quality import CheckResult
from gymgate.quality.record.findings import problems, proofs
from gymgate.quality.record.storage import shipped_records

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
        assert "cause not known" not in record.detail
        assert record.rows or "recorded " in record.detail
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
        assert proof.reason
        assert {(name, probe, False) for name in proof.environments for probe in proof.probes} <= flags, proof


def test_info_shows_them() -> None:
    shown = CliRunner().invoke(cli, ["info", "calendar"]).output
    assert "\nchecked 20" in shown
    assert " with nemo-gym 0.7.0 (" in shown
    assert "\n  verdict: match, 5 of 5 recorded rewards\n" in shown
    assert "docs/" not in shown
    assert "\n  rows: 5 rows; duplicates: 0; " in shown
    shown = CliRunner().invoke(cli, ["info", "mcqa"]).output
    assert re.search(r"\n  right answer: .*\\boxed\{answer\}; 10 of 10 rows ", shown)
    assert re.search(
        r"\n  model: SmolLM2\S+, .*temperature 1: 0.000 ± 0.000 over 10 rollouts of 5 rows\n", shown
    )
