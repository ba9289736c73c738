"""Which stored rollouts are played again, by what plan, and when one of them has diverged."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import orjson
import pytest

from gymgate.cli.rollout_commands import RunEnd, finish
from gymgate.core.config import EnvironmentConfig, ReplayEndpoint, RolloutLimits, StackConfig
from gymgate.core.errors import ConfigError, DataError
from gymgate.results.rescore import Rescoring, StoredRollout, StoredRun, as_recorded, where_to_run
from gymgate.rollouts import Rollout, RolloutError
from gymgate.rollouts.record import ModelCall
from gymgate.runs.collected.run import Collection
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.described.plan import Identity, Shard
from gymgate.runs.described.settings import differences, settings_of
from gymgate.runs.stored.record import CollectedRollout, failure_line
from gymgate.stack import AgentInfo

POLICY_GONE = {"kind": "policy", "type": "PolicyError", "message": "gone", "retryable": True}
SAID = {"response": {"output": [{"role": "assistant", "content": "x"}]}}


def line(key: int = 1, occurrence: int = 0, repeat: int = 0, **fields: Any) -> dict[str, Any]:
    identity = {"row_key": f"{key:016x}", "occurrence": occurrence, "repeat": repeat, "seed": None}
    where = {"task": key, "source": "rows.jsonl", "line": key, "environment": "e", "agent": "a"}
    return {**identity, **where, "status": "completed", "reward": 1.0, "calls": [], "result": SAID, **fields}


def stored(path: Path, *lines: dict[str, Any], **options: Any) -> StoredRun:
    path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in lines))
    return StoredRun(path, **options)


def call(**details: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "dialect": "chat",
        "status_code": 200,
        "request": {"messages": []},
        "details": details,
    }


def rows_at(path: Path, *texts: str) -> list[str]:
    """A file of rows with these inputs; their keys."""
    from gymgate.gym.row_sources import open_rows

    rows = [{"responses_create_params": {"input": text}} for text in texts]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return [row.key for row in open_rows(str(path), environment=None)]


def test_a_plan_has_the_stored_rollouts_and_no_other(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    one, two, _ = rows_at(source, "one", "two", "two")
    lines = [
        line(repeat=2, row_key=one, source=str(source)),
        line(occurrence=1, repeat=1, row_key=two, source=str(source)),
    ]
    run = stored(tmp_path / "r.jsonl", *lines)
    plan = run.plan()
    found = [*plan.rollouts()]
    assert {each.identity for each in found} == {Identity(one, 0, 2, None), Identity(two, 1, 1, None)}
    assert {each.row.data["responses_create_params"]["input"] for each in found} == {"one", "two"}
    assert plan.total() == 2
    both = [line(occurrence=each, row_key=two, line=each + 2, source=str(source)) for each in (1, 0)]
    found = [*stored(tmp_path / "both.jsonl", *both).plan().rollouts()]
    assert {each.row.line - each.identity.occurrence for each in found} == {2}
    assert sum(run.plan(Shard(index, 3)).total() for index in (1, 2, 3)) == 2
    source.write_text('{"responses_create_params": {"input": "other"}}\n')
    with pytest.raises(DataError, match="has changed"):
        run.plan()


def test_an_equal_row_without_rollouts_does_not_shift_those_after_it(tmp_path: Path) -> None:
    """Their `_ng_*` entries, which their keys leave out, go to the environment's server."""
    source = tmp_path / "rows.jsonl"
    rows = [{"responses_create_params": {"input": "one"}, "_ng_task_id": each} for each in "ABCD"]
    source.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    [key] = set(rows_at(tmp_path / "key.jsonl", "one"))
    lines = [
        line(occurrence=each, row_key=key, task=each, line=each + 1, source=str(source)) for each in (0, 3, 2)
    ]
    planned = stored(tmp_path / "r.jsonl", *lines).plan().rollouts()
    assert {each.identity.occurrence: each.row.data["_ng_task_id"] for each in planned} == {
        0: "A",
        2: "C",
        3: "D",
    }


def test_the_position_is_that_of_the_replay(tmp_path: Path) -> None:
    (path := tmp_path / "r.jsonl").write_bytes(
        b"\n" + orjson.dumps(line(1)) + b"\n\n" + orjson.dumps(line(2)) + b'\n{"torn'
    )
    assert [each.position for each in StoredRun(path).rollouts.values()] == [0, 1]


def test_a_run_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_bytes(orjson.dumps({"format": 1, "settings": {}, "extent": {}}))
    (tmp_path / "rollouts.jsonl").write_bytes(orjson.dumps(line()) + b"\n")
    monkeypatch.chdir(tmp_path)
    assert len(StoredRun(Path()).rollouts) == 1


def test_what_finished_counts_before_what_failed(tmp_path: Path) -> None:
    failed = line(error={**POLICY_GONE, "kind": "environment"}, result=None, calls=[call()])
    run = stored(tmp_path / "r.jsonl", failed, failed, line(), line(), failed)
    [each] = run.rollouts.values()
    assert (each.position, run.twice) == (2, 1)
    [each] = stored(tmp_path / "r.jsonl", failed, failed).rollouts.values()
    assert each.position == 1
    judge = {**failed, "error": POLICY_GONE}
    for lines in ((judge, line()), (line(), judge)):
        with pytest.raises(DataError, match="no rollout with a failed judge"):
            stored(tmp_path / "r.jsonl", *lines, judge_failed_only=True)


def test_a_rollout_whose_policy_failed_cannot_be_played(tmp_path: Path) -> None:
    gone = line(2, error=POLICY_GONE, result=None, calls=[call(), {**call(), "status_code": 502}])
    judge = line(3, error=POLICY_GONE, result=None, calls=[call(), {**call(), "model_server": "judge"}])
    other = line(4, error={**POLICY_GONE, "type": "DivergedError"}, result=None, calls=[call()])
    lines = (line(1), gone, judge, other)
    run = stored(tmp_path / "r.jsonl", *lines)
    assert ([each.position for each in run.rollouts.values()], run.silent) == ([0, 2, 3], 1)
    run = stored(tmp_path / "r.jsonl", *lines, judge_failed_only=True)
    assert [each.position for each in run.rollouts.values()] == [2]
    run = stored(tmp_path / "r.jsonl", {**gone, "final": False}, {**gone, "final": True}, line(1))
    assert run.silent == 1, "it counts rollouts, not attempts"


def test_what_a_judge_was_asked_does_not_say_what_the_policy_said(tmp_path: Path) -> None:
    calls = [{**call(), "request": None}, {**call(), "model_server": "judge"}]
    run = stored(tmp_path / "r.jsonl", line(1), line(2, result={}, calls=calls))
    assert (len(run.rollouts), run.silent) == (1, 1)


def test_a_policy_whose_only_call_was_refused_said_nothing(tmp_path: Path) -> None:
    """As one that overflowed the model's context: the rollout is truncated, and has no error."""
    refused = line(2, status="truncated", result={}, calls=[{**call(), "status_code": 400}])
    run = stored(tmp_path / "r.jsonl", line(1), refused)
    assert (len(run.rollouts), run.silent) == (1, 1)


def test_shards_of_different_runs_are_not_rescored_as_one(tmp_path: Path) -> None:
    for index, release in ((1, "0.7.0"), (2, "0.6.0")):
        (shard := tmp_path / f"shard-{index}-of-2").mkdir()
        settings = {"nemo_gym": release}
        (shard / "run.json").write_bytes(orjson.dumps({"format": 1, "settings": settings, "extent": {}}))
        (shard / "rollouts.jsonl").write_bytes(orjson.dumps(line(index)) + b"\n")
    with pytest.raises(ConfigError, match=r"0\.7\.0.*0\.6\.0"):
        StoredRun(tmp_path)


def test_rows_of_nemo_gyms_collector_are_those_that_it_wrote_beside_its_rollouts(tmp_path: Path) -> None:
    """Or, where it wrote none, what its results repeat of them, without what became of the rollout."""
    params = {"input": "hi"}
    lines = [
        {
            "_ng_task_index": task,
            "_ng_rollout_index": 0,
            "agent_ref": {"name": "a"},
            "responses_create_params": params,
            "mask_sample": True,
            "failure_kind": "judge",
            "expected": task,
            **SAID,
        }
        for task in range(2)
    ]
    run = stored(tmp_path / "r.jsonl", *lines)
    rows = [each.row.data for each in run.plan().rollouts()]
    kept = {"agent_ref": {"name": "a"}, "responses_create_params": params}
    assert rows == [{**kept, "expected": task} for task in range(2)]
    inputs = [{**kept, "_ng_task_index": task, "_ng_rollout_index": 0, "raw": task} for task in range(2)]
    beside = tmp_path / "r_materialized_inputs.jsonl"
    beside.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in inputs))
    rows = [each.row.data for each in StoredRun(run.path).plan().rollouts()]
    assert rows == [{**kept, "raw": task} for task in range(2)]


OF_E = AgentInfo("e", "a", "simple_agent")


def stack_of(config: StackConfig, **fields: Any) -> Any:
    names = {each.name: each.name for each in config.environments}
    return SimpleNamespace(**{"config": config, "agents": {"a": OF_E}, "names": names, **fields})


@pytest.mark.parametrize(
    ("environments", "stored_environment", "agent", "where"),
    [
        (("e", "f"), "e", "a", ("e", "a")),
        (("e", "f"), "f", "a", ("f", None)),
        (("e", "f"), "g", "a", (None, "a")),
        (("e",), "g", "a", ("e", "a")),
        (("e",), "g", "gone", ("e", None)),
        ((EnvironmentConfig(name="e", agent="other"),), "e", "a", ("e", None)),
    ],
)
def test_where_a_stored_rollout_is_played(
    environments: Any, stored_environment: str, agent: str, where: tuple[str | None, str | None]
) -> None:
    stack = stack_of(StackConfig(environments=environments))
    assert where_to_run(StoredRollout("r", 0, stored_environment, agent), stack) == where


def test_a_stored_rollout_that_no_stack_plays_is_named() -> None:
    stack = stack_of(StackConfig(environments=("e", "f")))
    with pytest.raises(ConfigError, match=r"'g'.*'gone'"):
        where_to_run(StoredRollout("r", 0, "g", "gone"), stack)


async def test_a_rollout_is_answered_from_its_own_recording(tmp_path: Path) -> None:
    """And counts for the environment that it is stored with, which it is compared by."""
    source = tmp_path / "rows.jsonl"
    [key] = rows_at(source, "one")
    lines = [line(row_key=key, source=str(source), repeat=repeat) for repeat in range(2)]
    run = stored(tmp_path / "r.jsonl", *lines)
    asked: list[dict[str, Any]] = []

    async def play(row: dict[str, Any], **settings: Any) -> Rollout:
        asked.append(settings)
        return Rollout(id="r", environment="played", agent="a", status="completed", reward=1.0)

    config = StackConfig(environments=("played",))
    stack = stack_of(config, agents={}, run=play)
    rescoring = Rescoring(
        stack=config, policy=ReplayEndpoint(rollouts=("r",)), plan=run.plan(), stored=run, names=["r"]
    )
    played = [await rescoring._run_one(stack, planned) for planned in rescoring.plan.rollouts()]
    assert [rollout.environment for rollout in played] == ["e", "e"]
    assert [each["policy"] for each in asked] == [
        ReplayEndpoint(rollouts=(str(run.path),), index=index) for index in range(2)
    ]


def test_a_run_in_the_place_of_another_one_is_another(tmp_path: Path) -> None:
    """Else its rollouts would be taken for those that were scored before: equal rows, repeats and policy."""
    source, path = tmp_path / "rows.jsonl", tmp_path / "run"
    [key] = rows_at(source, "one")
    path.mkdir()
    settings = []
    for created in (1, 2):
        described = {"format": 1, "settings": {"policy": {}}, "created": created}
        (path / "run.json").write_bytes(orjson.dumps(described))
        stored(path / "rollouts.jsonl", line(row_key=key, source=str(source)))
        run = StoredRun(path)
        policy = ReplayEndpoint(rollouts=(str(path),))
        settings.append(
            Rescoring(StackConfig(environments=("e",)), policy, run.plan(), stored=run).settings()
        )
    assert differences(*settings) == ["rescored.created: 1 there, 2 here"]


def test_seeds_are_those_of_the_run(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    [key] = rows_at(source, "one")
    seeded = [line(row_key=key, source=str(source), seed=seed) for seed in (7, 3)]
    assert stored(tmp_path / "r.jsonl", *seeded).plan().seeds == (3, 7)
    replay = ReplayEndpoint(rollouts=(str(tmp_path / "r.jsonl"),))
    plan = stored(tmp_path / "r.jsonl", *seeded).plan()
    Collection(StackConfig(environments=("mcqa",)), replay, plan)  # recorded answers have no seeds to be sent
    mixed = stored(tmp_path / "r.jsonl", *seeded, line(row_key=key, source=str(source)))
    with pytest.raises(ConfigError, match="with seeds and without"):
        mixed.plan()


def test_a_number_of_equal_rows_that_no_run_has_is_refused(tmp_path: Path) -> None:
    """One number in a line took all memory."""
    source = tmp_path / "rows.jsonl"
    [key] = rows_at(source, "one")
    run = stored(tmp_path / "r.jsonl", line(row_key=key, source=str(source), occurrence=1 << 53))
    with pytest.raises(DataError, match=r"r\.jsonl: .* equal"):
        run.plan()


def test_a_last_failure_keeps_the_calls_whose_bodies_were_kept() -> None:
    error = RolloutError(kind="policy", message="m", type="PolicyError")
    for request in ({"messages": []}, None):
        made = ModelCall(index=0, dialect="chat", status_code=200, request=request)
        rollout = CollectedRollout(
            id="", environment="e", agent="a", status="failed", error=error, row_key="0" * 16, calls=[made]
        )
        kept = orjson.loads(failure_line(rollout, final=True)).get("calls")
        assert (kept is None) == (request is None)
        assert "calls" not in orjson.loads(failure_line(rollout, final=False))


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([call(match="exact", turn=0, turns=2), call(match="exact", turn=1, turns=2)], None),
        (
            [call(match="exact", turn=0, turns=2), call(match="loose", turn=1, turns=2)],
            "at call 2: the environment said something else than recorded",
        ),
        (
            [call(match="exact", turn=0, turns=2), call(match="exact", turn=0, turns=2)],
            "after call 1: the agent ended there, and 2 calls are recorded",
        ),
        (
            [call(match="exact", turn=0, turns=2)],
            "after call 1: the agent ended there, and 2 calls are recorded",
        ),
        (
            [
                {**call(), "status_code": 422, "error": "no answer; nearest is r.jsonl:5, which differs"},
                call(match="exact", turn=0, turns=1),
            ],
            "at call 1: r.jsonl:5, which differs",
        ),
        (
            [call(match="exact", turn=0, turns=1), {**call(), "status_code": 502, "model_server": "judge"}],
            None,
        ),
    ],
)
def test_a_rollout_has_diverged_unless_every_call_went_as_recorded(
    calls: list[dict[str, Any]], reason: str | None
) -> None:
    models = [ModelCall.model_validate(each) for each in calls]
    rollout = Rollout(id="r", environment="e", agent="a", status="completed", reward=1.0, calls=models)
    seen = as_recorded(rollout)
    if reason is None:
        assert seen is rollout
        return
    assert seen.error is not None
    assert (seen.status, seen.reward, seen.error.type) == ("failed", None, "DivergedError")
    assert seen.error.message == f"diverged {reason}"
    assert not seen.error.retryable


def test_a_rollout_that_failed_before_its_end_has_not_diverged() -> None:
    error = RolloutError(kind="infrastructure", message="died", type="ServerDiedError")
    models = [ModelCall.model_validate(call(match="exact", turn=0, turns=2))]
    rollout = Rollout(id="r", environment="e", agent="a", status="failed", error=error, calls=models)
    assert as_recorded(rollout) is rollout


@pytest.mark.parametrize(
    "limits", [RolloutLimits(), RolloutLimits(max_calls=3, timeout_s=60.0), RolloutLimits(max_calls=None)]
)
def test_limits_come_back_from_settings(limits: RolloutLimits) -> None:
    settings = settings_of(ReplayEndpoint(rollouts=("r",)), limits, ["example"])
    assert RolloutLimits(**settings["limits"]) == limits


def test_a_note_on_the_run_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row has two scored rollouts and the other has one, as after an interruption or where one diverged."""
    source = tmp_path / "rows.jsonl"
    keys = rows_at(source, "one", "two")
    rows = [(1, keys[0], 0), (1, keys[0], 1), (2, keys[1], 0)]
    lines = [line(key, repeat=repeat, row_key=row, source=str(source)) for key, row, repeat in rows]
    run = stored(tmp_path / "r.jsonl", *lines)
    rescoring = Rescoring(
        stack=StackConfig(environments=("played",)),
        policy=ReplayEndpoint(rollouts=("r",)),
        plan=run.plan(),
        stored=run,
        names=["r"],
    )
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "run.json").write_bytes(orjson.dumps({"format": 1, "settings": {}, "extent": {}}))
    (directory / "rollouts.jsonl").write_bytes((tmp_path / "r.jsonl").read_bytes())
    rescoring.progress.tasks = read_runs([directory]).tasks
    end = RunEnd(interrupted=False, error=None)
    with contextlib.suppress(click.exceptions.Exit):
        finish(rescoring, end, None, ks=None, as_json=False, wide=False, note="1 diverged")
    printed = capsys.readouterr().err
    assert printed.count("1 diverged") == 1
