"""The options that make a command fail: each tried where there is nothing to judge by, only failures, a part, and everything."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from gymgate.cli.aggregate import command as aggregate
from gymgate.cli.compare import command as compare
from gymgate.core.errors import DataError, EnvironmentServerError
from gymgate.quality import CheckResult
from gymgate.quality.model import Thresholds
from gymgate.quality.record import deterministic, measure, trials
from gymgate.quality.record.context import Unmeasured
from gymgate.quality.record.findings import unmet_thresholds
from gymgate.quality.sections import ANSWERS
from gymgate.rollouts import ModelCall, Rollout
from gymgate.rollouts.result import failed_rollout
from support.checks import PARIS
from support.faulty import with_recordings
from support.scripted_stack import ScriptedStack, check_on

Outcomes = dict[str, list[str]]
"""By environment, what came of the rollout of each row: a reward, `failed`, `masked`, `unscored` or `missing`."""


def write_run(path: Path, outcomes: Outcomes, *, planned: bool = True, seed: int | None = None) -> Path:
    finished, failed = [], []
    for place, (environment, rows) in enumerate(outcomes.items()):
        for number, outcome in enumerate(rows):
            line: dict[str, Any] = {
                **{"row_key": f"{place:08x}{number:08x}", "occurrence": 0, "repeat": 0, "seed": seed},
                **{"task": number, "line": number + 1, "environment": environment, "agent": "a", "calls": []},
            }
            if outcome == "failed":
                error = {"kind": "policy", "type": "PolicyError", "message": "gone", "retryable": False}
                failed.append({**line, "final": True, "error": error})
            elif outcome != "missing":
                reward = None if outcome == "unscored" else 1.0 if outcome == "masked" else float(outcome)
                status = "masked" if outcome == "masked" else "completed"
                finished.append({**line, "status": status, "reward": reward, "result": {}})
    path.mkdir()
    extent = {"rollouts": sum(map(len, outcomes.values()))} if planned else {}
    described = {"format": 1, "settings": {"policy": {"type": "http", "model": "m"}}, "extent": extent}
    (path / "run.json").write_bytes(orjson.dumps(described))
    for name, lines in (("rollouts", finished), ("failures", failed)):
        (path / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("base", "other", "reason"),
    [
        ({"e": ["1", "0"]}, {"e": ["1", "0"]}, None),
        ({"e": ["1", "0"]}, {"e": ["0", "0"]}, "-0.5"),
        ({"e": ["1", "0"]}, {"e": ["failed", "failed"]}, "not measured in e"),
        ({"e": ["failed", "failed"]}, {"e": ["1", "0"]}, "not measured in e"),
        ({"e": ["1", "0"]}, {"e": ["masked", "unscored"]}, "not measured in e"),
        ({"e": ["1", "0"]}, {"e": ["failed", "0"]}, None),
        ({"e": ["1"], "f": ["1"]}, {"e": ["1"], "f": ["failed"]}, "not measured in f"),
        ({"e": ["1"], "f": ["1"]}, {"e": ["1"]}, None),
        ({"e": ["0.52"]}, {"e": ["0.50"]}, None),
    ],
    ids=[
        *("equal", "worse", "B failed", "A failed", "B without rewards", "a part of B failed"),
        *("one of two environments failed", "an environment that A alone has", "exactly the limit"),
    ],
)
def test_fail_if_worse(tmp_path: Path, base: Outcomes, other: Outcomes, reason: str | None) -> None:
    runs = [str(write_run(tmp_path / name, rows)) for name, rows in (("a", base), ("b", other))]
    done = CliRunner().invoke(compare, [*runs, "--fail-if-worse", "0.02"])
    assert done.exit_code == (0 if reason is None else 1), done.output
    assert (reason or "") in done.stderr
    assert ("--fail-if-worse" in done.stderr) == (reason is not None)


def test_fail_if_worse_of_another_seed_and_of_one_run_among_several(tmp_path: Path) -> None:
    base, same = (write_run(tmp_path / name, {"e": ["1", "1"]}) for name in ("a", "b"))
    seeded = write_run(tmp_path / "c", {"e": ["1", "1"]}, seed=5)
    for others in ([same, seeded], [seeded, same]):
        done = CliRunner().invoke(compare, [*map(str, (base, *others)), "--fail-if-worse", "0"])
        assert done.exit_code == 1
        assert isinstance(done.exception, DataError)  # there is nothing to compare


@pytest.mark.parametrize("limit", ["nan", "inf"])
def test_fail_if_worse_than_no_number(tmp_path: Path, limit: str) -> None:
    """No difference is lower than such a limit."""
    runs = [str(write_run(tmp_path / name, {"e": [reward]})) for name, reward in (("a", "1"), ("b", "0"))]
    done = CliRunner().invoke(compare, [*runs, "--fail-if-worse", limit])
    assert done.exit_code == 2
    assert limit in done.stderr


def test_an_environment_called_all_is_compared_alone(tmp_path: Path) -> None:
    """It falls, and the other rises."""
    base = write_run(tmp_path / "a", {"all": ["1", "1"], "f": ["0", "0"]})
    other = write_run(tmp_path / "b", {"all": ["0", "0"], "f": ["1", "1"]})
    done = CliRunner().invoke(compare, [str(base), str(other), "--json"])
    [compared] = orjson.loads(done.stdout)["compared"]
    assert [row["difference"] for row in compared["environments"]] == [-1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("outcomes", "planned", "reason"),
    [
        ({"e": ["1", "0", "masked"]}, True, None),
        ({"e": ["failed", "failed"]}, True, "failed: 2"),
        ({"e": ["1", "failed"], "f": ["1"]}, True, "failed: 1"),
        ({"e": ["missing", "missing"]}, True, "2 of 2"),
        ({"e": ["1", "missing"]}, True, "1 of 2"),
        ({"e": ["1", "0"]}, False, "not known"),
    ],
    ids=["complete", "failed", "a part failed", "nothing", "a part", "no plan"],
)
def test_complete(tmp_path: Path, outcomes: Outcomes, planned: bool, reason: str | None) -> None:
    run = write_run(tmp_path / "r", outcomes, planned=planned)
    done = CliRunner().invoke(aggregate, [str(run), "--complete"])
    assert done.exit_code == (0 if reason is None else 1), done.output
    assert (reason or "") in done.stderr
    assert ("--complete: " in done.stderr) == (reason is not None)


def test_complete_of_what_nemo_gym_collected(tmp_path: Path) -> None:
    """Its failures stand in a file beside the rollouts."""
    path, agent = tmp_path / "rollouts.jsonl", {"name": "a"}
    numbers = [{"_ng_task_index": task, "_ng_rollout_index": 0, "agent_ref": agent} for task in range(2)]
    path.write_bytes(orjson.dumps({**numbers[0], "reward": 1.0, "response": {}}) + b"\n")
    failure = {**numbers[1], "_ng_failure_class": "agent_run_error", "_ng_failure_message": "gone"}
    (tmp_path / "rollouts_failures.jsonl").write_bytes(orjson.dumps(failure) + b"\n")
    done = CliRunner().invoke(aggregate, [str(path), "--complete"])
    assert done.exit_code == 1
    assert "failed: 1" in done.stderr


class Scorer:
    """Scores the wanted answer with 1; later scorings as it is told."""

    def __init__(self, later: list[float | None]) -> None:
        self._later = later
        self.count = 0

    async def __call__(self, stack: ScriptedStack, row: dict[str, Any], text: str) -> float:
        self.count += 1
        reward = 1.0 if self.count == 1 else self._later[min(self.count - 2, len(self._later) - 1)]
        if reward is None:
            raise EnvironmentServerError("verify broke", server="faulty")
        return reward


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        ([1.0], None),
        ([0.0], "1 of 1 rollouts"),
        ([0.0, 1.0], "1 of 1 rollouts"),
        ([None], "not measured"),
        ([1.0, None], "9 of 10 scorings"),
    ],
    ids=["the same", "all others changed", "one changed", "failures", "a part failed"],
)
async def test_deterministic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: list[float | None], reason: str | None
) -> None:
    """One recorded rollout is replayed, which gives the recorded reward, and then scored ten times."""
    monkeypatch.setattr(measure, "MEASUREMENTS", {"deterministic": deterministic.measure})
    config = with_recordings(tmp_path, PARIS)
    check, _ = await check_on(monkeypatch, config, Scorer(later), measure=True)
    assert check.verdict == "match"
    lines = list(unmet_thresholds(check, Thresholds(deterministic=True, reproducible=True)))
    assert len(lines) == (0 if reason is None else 1), lines
    assert all(line.startswith("--deterministic: ") for line in lines)
    assert all((reason or "") in line for line in lines)


async def test_deterministic_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MEASUREMENTS", {"deterministic": deterministic.measure})

    async def score(stack: ScriptedStack, row: dict[str, Any], text: str) -> None:
        """The answer has no reward."""

    check, _ = await check_on(monkeypatch, with_recordings(tmp_path), score, measure=True)
    (line,) = unmet_thresholds(check, Thresholds(deterministic=True))
    assert line.startswith("--deterministic: not measured: ")


class AnswerContext:
    """A context whose rows pay the right answer, some of them nothing, not even 0."""

    def __init__(self, rows: int, broken: int, paid: int) -> None:
        params = {"input": [{"role": "user", "content": "?"}]}
        self.rows = [{"responses_create_params": params, "answer": f"town {n}", "n": n} for n in range(rows)]
        self._broken, self._paid = broken, paid
        self.recorded: tuple[Any, ...] = ()
        self.results: tuple[Any, ...] = ()
        self.request = SimpleNamespace(stack=SimpleNamespace(models=()), probes=())
        self.judge = SimpleNamespace(refused=0)
        self.oracle: Any = None
        self.trials: Any = ()
        self.config = SimpleNamespace(path=Path("/no/config"), judges=())
        self.judge_problem = None

    def refuse_cohorts(self) -> None:
        """A row's rollouts are not scored against each other."""

    async def run_without_judge(self, replay: Any, policy: Any, **limits: Any) -> Rollout:
        number = replay.row["n"]
        if number < self._broken:
            return failed_rollout(EnvironmentServerError("verify broke", server="s"))
        answer = policy({"model": "m", **replay.row["responses_create_params"]})
        answer = await answer if isinstance(answer, Awaitable) else answer
        text = answer["output"][0].get("content", [{"text": ""}])[0]["text"]
        reward = float(text == replay.row["answer"] and number < self._broken + self._paid)
        calls = [ModelCall(index=0, dialect="responses")]
        return Rollout(id="r", environment="e", agent="a", status="completed", reward=reward, calls=calls)


@pytest.mark.parametrize(
    ("rows", "broken", "paid", "reason"),
    [
        (10, 0, 10, None),
        (10, 0, 9, "row 9"),
        (10, 10, 0, "not measured: other"),
        (10, 4, 6, "not measured: no reward in any phrasing for row 0, row 1, row 2, row 3"),
        (0, 0, 0, "not measured: no answer"),
    ],
    ids=["all paid", "one unpaid", "failures", "a part fails", "nothing"],
)
async def test_min_oracle_reward(rows: int, broken: int, paid: int, reason: str | None) -> None:
    context: Any = AnswerContext(rows, broken, paid)
    record = CheckResult(
        **{"environment": "e", "kind": "config", "nemo_gym": "0.7.0", "gymgate": "0", "date": "d"},
        verdict="match",
        oracle=await trials.measure_right_answers(context),
    )
    lines = list(unmet_thresholds(record, Thresholds(min_oracle_reward=1.0)))
    assert len(lines) == (0 if reason is None else 1), lines
    assert all((reason or "") in line for line in lines)


@pytest.mark.parametrize(
    ("rows", "broken", "reason"),
    [
        (10, 0, None),
        (10, 10, "not measured: empty, fixed sentence, the prompt"),
        (10, 4, "not measured: empty, fixed sentence, the prompt (no reward in 4 of 10 rows)"),
        (0, 0, "not measured: it has no rows"),
    ],
    ids=["nothing earned", "failures", "a part fails", "nothing"],
)
async def test_max_constant_reward(rows: int, broken: int, reason: str | None) -> None:
    context: Any = AnswerContext(rows, broken, paid=rows)
    about = {"environment": "e", "kind": "config", "nemo_gym": "0.7.0", "gymgate": "0", "date": "d"}
    try:
        record = CheckResult(**about, verdict="match", probes=await trials.measure(context))
    except Unmeasured as error:
        record = CheckResult(**about, verdict="match", missing={"probes": str(error)})
    lines = list(unmet_thresholds(record, Thresholds(max_constant_reward=0.0)))
    assert len(lines) == (0 if reason is None else 1), lines
    assert all((reason or "") in line for line in lines)


async def test_a_recorded_row_without_its_answer_is_no_part_of_it() -> None:
    """NeMo Gym's records often lack fields of their rows, and such a row is never scored."""
    context: Any = AnswerContext(10, 1, paid=9)
    lacking = SimpleNamespace(reward=None, turns=[[]])
    context.recorded = (SimpleNamespace(row=context.rows.pop(0), recording=lacking),)
    context.results = (SimpleNamespace(verdict="incomplete"),)
    context.replay_of = lambda recorded: SimpleNamespace(row=recorded.row)
    measured = await trials.measure(context)
    assert {(measured.answers[name].rows, measured.answers[name].failed) for name in ANSWERS[:3]} == {(9, 0)}
