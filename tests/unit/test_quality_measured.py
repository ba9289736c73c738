"""What is measured of an environment that runs: its oracle, and what it does where its judge is down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gymgate.quality.model import Thresholds
from gymgate.quality.record import deterministic, failure_cases, measure, trials
from gymgate.quality.record.findings import problems, unmet_thresholds
from gymgate.quality.record.overhead import _tool_calls_ms, ceiling
from gymgate.rollouts import ModelCall, Rollout
from support.checks import PARIS, message, recorded
from support.faulty import with_recordings
from support.scripted_stack import ScriptedStack, check_on


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, (50.0, "1 core")), (2, (100.0, "2 cores")), (16, (125.0, "agent"))]
)
def test_what_a_machine_carries(cores: int, expected: tuple[float, str]) -> None:
    """A process has one core at most, and all have those of the machine: 20 ms a rollout, of which the agent takes 8."""
    rate, limit = ceiling({"agent": 0.008, "resources": 0.004}, 0.020, cores)
    assert (pytest.approx(rate), limit) == expected


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

    only(monkeypatch, {"deterministic": deterministic.measure, "failures": failure_cases.measure})
    judged = {"judge_evaluations": [{"response": {"output": message("It is Paris.")}}]}
    config = with_recordings(tmp_path, recorded("capital of France?", "Lyon", 1.0, **judged))
    check, _ = await check_on(monkeypatch, config, score, measure=True)
    (line,) = unmet_thresholds(check, Thresholds(honest=True))
    assert line.startswith("--honest: ")
    assert "(0)" in line
    assert "1 of 1 rollouts" in line
    assert check.failures
    assert check.failures.cases["judge_down"].outcomes == {"number": 1}
    assert check.deterministic
    assert [*check.deterministic.missing] == ["at_once"]


TOWNS = (("France", "Paris", "Paris"), ("Italy", "Rome", "Rome"), ("Spain", "Madrid", "Madrid"))
WRONG_KEY = (*TOWNS[:2], ("Spain", "Madrid", "Lisbon"))


@pytest.mark.parametrize(
    ("towns", "paid", "kinds"),
    [
        (TOWNS, r"\boxed{answer}", []),
        (WRONG_KEY, r"\boxed{answer}", ["answer suspect"]),
        (TOWNS, "Answer: answer", ["right answer rejected"]),
    ],
    ids=["sound", "wrong key", "trap in the phrasing"],
)
async def test_a_wrong_key_and_a_trap_in_the_phrasing_are_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    towns: tuple[tuple[str, str, str], ...],
    paid: str,
    kinds: list[str],
) -> None:
    """The prompts ask for a box; the server pays the right town in one phrasing, whatever the row says."""
    only(monkeypatch, {"oracle": trials.measure_right_answers})
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

    async def score(stack: ScriptedStack, row: dict[str, Any], text: str) -> float:
        return float(row.get("wanted", "nothing") in text)

    check, _ = await check_on(monkeypatch, config, score, measure=True)
    assert check.oracle is not None, check.missing
    assert check.oracle.asked_for == r"\boxed{answer}"
    assert (check.oracle.field, check.oracle.accepted) == ("expected_answer", [paid])
    assert check.oracle.unsolved == check.oracle.suspect == (("row 2",) if towns is WRONG_KEY else ())
    assert [each.kind for each in problems(check) if each.kind != "reward differs"] == kinds
    assert check.data is not None
    assert (check.data.files, check.data.duplicates) == ({"example": 3}, 0)


def test_calls_that_a_turn_makes_share_its_time() -> None:
    asked = {"output": [{"type": "function_call"}] * 2}
    calls = [
        ModelCall(index=n, dialect="responses", started_s=3.0 * n, duration_s=1.0, response=asked)
        for n in range(2)
    ]
    rollout = Rollout(id="r", environment="e", agent="a", status="completed", calls=calls)
    assert [*_tool_calls_ms(rollout)] == [1000.0, 1000.0]
