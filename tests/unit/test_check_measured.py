"""What is measured of an environment that runs: its oracle, and what it does where its judge is down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gymgate.check.record import deterministic, failures, measure, oracle
from gymgate.check.record.findings import Thresholds, findings, missed
from support.checks import PARIS, message, recorded
from support.faulty import with_recordings
from support.scripted_stack import ScriptedStack, check_on


def only(monkeypatch: pytest.MonkeyPatch, measurements: Mapping[str, Any]) -> None:
    monkeypatch.setattr(measure, "MEASUREMENTS", measurements)


async def test_an_environment_that_swallows_its_judges_failure_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def score(stack: ScriptedStack, row: dict[str, Any], text: str) -> float:
        try:
            return float(row["wanted"] in await stack.ask_judge(text))
        except aiohttp.ClientError:
            return 0.0

    only(monkeypatch, {"deterministic": deterministic.measure, "failures": failures.measure})
    judged = {"judge_evaluations": [{"response": {"output": message("It is Paris.")}}]}
    config = with_recordings(tmp_path, recorded("capital of France?", "Lyon", 1.0, **judged))
    check, _ = await check_on(monkeypatch, config, score, measure=True)
    (line,) = missed(check, Thresholds(honest=True))
    assert line.startswith("--honest: ")
    assert "(0)" in line
    assert "1 of 1 rollouts" in line
    assert check.failures
    assert check.failures.cases["judge_down"].outcomes == {"number": 1}
    assert check.deterministic
    assert [*check.deterministic.missing] == ["at_once"]


async def test_a_wrong_key_and_a_trap_in_the_phrasing_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts ask for a box, the server wants `Answer: X`, and the third row's answer is wrong."""
    only(monkeypatch, {"oracle": oracle.measure})
    config = with_recordings(tmp_path, PARIS)
    rows = [
        {
            "responses_create_params": {
                "input": [{"role": "user", "content": rf"Capital of {land}? Use \boxed{{}}."}]
            },
            "wanted": f"Answer: {town}",
            "expected_answer": answer,
        }
        for land, town, answer in (
            ("France", "Paris", "Paris"),
            ("Italy", "Rome", "Rome"),
            ("Spain", "Madrid", "Lisbon"),
        )
    ]
    (config.parents[1] / "data" / "example.jsonl").write_text("\n".join(map(json.dumps, rows)))

    async def score(stack: ScriptedStack, row: dict[str, Any], text: str) -> float:
        return float(row.get("wanted", "nothing") in text)

    check, _ = await check_on(monkeypatch, config, score, measure=True)
    assert check.oracle is not None, check.missing
    assert check.oracle.asked_for == r"\boxed{answer}"
    assert (check.oracle.field, check.oracle.paid) == ("expected_answer", ["Answer: answer"])
    assert (check.oracle.solved, check.oracle.rows, check.oracle.unsolved) == (2, 3, ("row 2",))
    assert check.oracle.others["Answer: answer"].full == 0
    assert any(r"\boxed{answer}" in line for line in findings(check))
