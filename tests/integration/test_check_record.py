"""The quality record on real servers: a sound environment, and one that is wrong in each respect, which is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gymgate.check import CheckRequest, CheckResult
from gymgate.check.environment import check_environment
from gymgate.check.record import measure, oracle
from gymgate.check.record.files import load_record
from gymgate.check.record.findings import findings
from support.checks import PARIS, message, recorded
from support.faulty import with_recordings
from support.upstream import scripted_chat

pytestmark = [pytest.mark.gym, pytest.mark.timeout(600)]  # the first use of a release installs it

ROME = recorded("of Italy?", "Milan", 0.0)
CALL = {"type": "function_call", "name": "look_up", "arguments": "{}", "call_id": "c", "id": "f"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": '"Paris"'}


def with_tool() -> str:
    """The recording of Paris, with a call of the server's tool before the answer."""
    record = json.loads(PARIS)
    record["response"]["output"] = [CALL, OUTPUT, *message("Paris")]
    return json.dumps(record)


def measured(config: Path, fault: str, *options: str) -> tuple[subprocess.CompletedProcess[str], CheckResult]:
    """Check with every threshold; the command, and the record that it wrote."""
    store = config.parents[3] / "records"
    command = [
        sys.executable, "-m", "gymgate", "check", str(config), "--record", str(store), "--set",
        f"faulty.resources_servers.faulty.fault={fault}", "--max-constant-reward", "0.05", "--deterministic", "--honest",
    ]  # fmt: skip
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=550, check=False)
    record = load_record(store / "config" / "faulty-0.7.0.json")
    assert record is not None, done.stderr
    return done, record


def missed(done: subprocess.CompletedProcess[str]) -> list[str]:
    lines = [line.partition("threshold not met: ")[2] for line in done.stderr.splitlines()]
    assert done.returncode == int(any(lines)), done.stderr
    return [line for line in lines if line]


def test_a_sound_environment_meets_every_threshold(tmp_path: Path) -> None:
    config = with_recordings(tmp_path, PARIS, ROME, with_tool())

    def answer(asked: str) -> str:
        return "Paris" if "France" in asked else "Milan"

    with scripted_chat(answer) as url:
        done, record = measured(config, "none", "--reproducible", "-b", url, "-m", "scripted")
    assert missed(done) == []
    assert "scripted: pass@1 0.500 ± 0.500, 2 rows" in done.stdout
    assert (record.verdict, record.matched) == ("match", 3)
    assert record.missing == {}
    again, trivial, cost, shape = record.deterministic, record.trivial, record.cost, record.shape
    assert again
    assert trivial
    assert cost
    assert shape
    assert record.failures
    assert record.policy
    assert (again.rollouts, again.failed, again.at_once, again.changed) == (3, 0, 8, ())
    assert again.scored >= 3 + 3 + 8
    assert trivial.recorded_mean == pytest.approx(2 / 3)
    assert {name: each.mean for name, each in trivial.answers.items()} == {
        "empty": 0.0, "fixed sentence": 0.0, "the prompt": 0.0, "another row's best": 0.0,
    }  # fmt: skip
    cases = record.failures.cases
    assert cases["tool_timeout"].outcomes == {"error": 1}
    assert cases["cut_off"].outcomes == {"truncated": 3}
    assert cases["long_answer"].outcomes == {"number": 3}
    assert record.failures.missing == {"judge_down": "no judge is asked"}
    for figure in (
        cost.ready_s, cost.verification_ms, cost.verification_p99_ms, cost.tool_call_ms, cost.rest_mb, cost.busy_mb,
        cost.rollouts_per_core_s,
    ):  # fmt: skip
        assert figure is not None
        assert figure > 0
    assert (cost.verifications, cost.tool_calls, cost.missing) == (30, 10, {})
    assert (shape.rows, shape.recordings, shape.most_turns) == (2, 3, 2)
    assert shape.rewards == {"0": 1, "1": 2}
    assert shape.missing == dict.fromkeys(("input_tokens", "output_tokens"), "no recorded rollout says it")
    assert (record.policy.model, record.policy.rows, record.policy.pass_at_1) == ("scripted", 2, 0.5)


def test_an_environment_that_is_wrong_in_every_respect_is_caught(tmp_path: Path) -> None:
    """It rewards the empty answer, gives random rewards, and crashes on a long answer."""
    done, record = measured(with_recordings(tmp_path, PARIS, ROME), "empty random long")
    found = missed(done)
    for option, what in (
        ("--max-constant-reward", "an empty answer earns 1 on average, above 0 in 2 of 2 rows"),
        ("--deterministic", "2 of 2 rollouts get another reward; example_rollouts:1: 0."),
        ("--honest", "no reward if the answer has a quarter of a million characters, in "),
    ):
        assert any(line.startswith(option) and what in line for line in found), found
    assert record.deterministic
    assert len(record.deterministic.changed) == 2


JUDGED = {"judge_evaluations": [{"response": {"output": message("It is Paris.")}}]}


def test_an_environment_that_swallows_its_judges_failure_is_caught(tmp_path: Path) -> None:
    config = with_recordings(tmp_path, recorded("capital of France?", "Lyon", 1.0, **JUDGED))
    done, record = measured(config, "swallows")
    honest = [line for line in missed(done) if line.startswith("--honest")]
    assert honest == ["--honest: a reward (0) if its judge does not answer, in 1 of 1 rollouts"]
    assert record.failures
    assert record.failures.cases["judge_down"].outcomes == {"number": 1}
    assert record.deterministic
    assert record.deterministic.missing == {
        "at_once": "its judge's recorded answers belong to one rollout at a time"
    }


def test_info_shows_the_record_that_ships() -> None:
    command = [sys.executable, "-m", "gymgate", "info", "calendar"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert "\nchecked 20" in done
    assert " with nemo-gym 0.7.0 (" in done
    assert "\n  verdict: match, 5 of 5 recorded rewards\n" in done
    command[-1] = "mcqa"
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert "\n  right answer: pays for \\boxed{answer}; 10 of 10 rows solvable\n" in done


TOWNS = (("France", "Paris", "Paris"), ("Italy", "Rome", "Rome"), ("Spain", "Madrid", "Madrid"))
WRONG_KEY = (*TOWNS[:2], ("Spain", "Madrid", "Lisbon"))


@pytest.mark.parametrize(
    ("towns", "paid", "noticed"),
    [
        (TOWNS, r"\boxed{answer}", []),
        (
            WRONG_KEY,
            r"\boxed{answer}",
            [
                "the answer of row 2 ('expected_answer') earns no full reward in any phrasing, those of 2 other rows do"
            ],
        ),
        (
            TOWNS,
            "Answer: answer",
            [
                r"the right answer as the prompt asks for it (\boxed{answer}) earns no full reward, in 3 rows; as Answer: answer "
                "it does"
            ],
        ),
    ],
    ids=["sound", "wrong key", "trap in the phrasing"],
)
async def test_a_wrong_key_and_a_trap_in_the_phrasing_are_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    towns: tuple[tuple[str, str, str], ...],
    paid: str,
    noticed: list[str],
) -> None:
    """The prompts ask for a box; the server pays the right town in one phrasing, whatever the row says."""
    config = with_recordings(tmp_path, PARIS)
    rows = [
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": rf"Capital of {land}? Use \boxed{{}}."}]
            },
            "wanted": paid.replace("answer", town),
            "expected_answer": answer,
        }
        for land, town, answer in towns
    ]
    (config.parents[1] / "data" / "example.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(measure, "MEASUREMENTS", {"oracle": oracle.measure})
    request = CheckRequest(environment=str(config), version="0.7.0", measure=True)
    result = await check_environment(request)
    found = result.oracle
    assert found is not None, result.missing
    assert (found.field, found.asked_for, found.paid) == ("expected_answer", r"\boxed{answer}", [paid])
    assert found.others[paid].full == 0
    assert [line for line in findings(result) if "answer" in line] == noticed
    assert result.data is not None
    assert (result.data.files, result.data.duplicates) == ({"example": 3}, 0)
