"""What a command line asks for, and what the closing table says, without running anything."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from gymgate.cli import cli
from gymgate.cli.metrics_tables import print_results
from gymgate.cli.rollout_commands import run_output
from gymgate.cli.texts import parse_judges
from gymgate.core.config import HTTPEndpoint, ReplayEndpoint
from gymgate.core.errors import ConfigError, DataError
from gymgate.gateway.replay.recording import Recording
from gymgate.gym.row_sources import RowSource, open_rows
from gymgate.rollouts import Rollout, RolloutError
from gymgate.runs.collected.policies import only_recorded, recordings_of, replay_files
from gymgate.runs.collected.progress import RunProgress
from gymgate.runs.counted.metrics import summary_rows
from gymgate.runs.counted.tasks import CollectedTasks
from gymgate.runs.described.plan import RolloutPlan
from support.collecting import add, as_collected
from support.command_lines import environments_of, settings_of


def test_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert parse_judges(["judge=http://h/v1", "sim=org/m@https://k:8000/v1", "*=policy", "tools=none"]) == {
        "judge": HTTPEndpoint(base_url="http://h/v1"),
        "sim": HTTPEndpoint(base_url="https://k:8000/v1", model="org/m"),
        "*": "policy",
        "tools": "none",
    }
    for wrong in ("judge", "=http://h", "judge=", "judge=m@h"):
        with pytest.raises(ConfigError, match="NAME=URL, NAME=MODEL@URL, NAME=policy or NAME=none"):
            parse_judges([wrong])


def test_judges_have_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("JUDGE_KEY", "a")
    monkeypatch.setenv("OTHER_KEY", "b")
    judges = ["judge=m@https://h/v1", "sim=https://k/v1", "tool=policy"]

    def variables(*key_vars: str) -> list[str | None]:
        found = parse_judges(judges, key_vars)
        return [each.api_key_env for each in found.values() if isinstance(each, HTTPEndpoint)]

    assert variables() == [None, None]
    assert variables("judge=JUDGE_KEY") == ["JUDGE_KEY", None]
    assert variables("judge=JUDGE_KEY", "*=OTHER_KEY") == ["JUDGE_KEY", "OTHER_KEY"]
    monkeypatch.setenv("OPENAI_API_KEY", "c")
    assert variables("sim=JUDGE_KEY") == ["OPENAI_API_KEY", "JUDGE_KEY"]
    for wrong in ("judge", "judge=", "judge=NO_SUCH_KEY", "tool=JUDGE_KEY", "nosuch=JUDGE_KEY"):
        with pytest.raises(ConfigError, match="--judge-key-var"):
            parse_judges(judges, [wrong])


def test_environment_options() -> None:
    (one,) = environments_of(
        ["a"],
        *("--config", "c", "--agent", "agent"),
        *settings_of("x.y=1", "z=[a, b]", "x.url=http://h:1/v1"),
    )
    assert (one.name, one.config, one.agent) == ("a", "c", "agent")
    assert dict(one.overrides) == {"x.y": 1, "z": ("a", "b"), "x.url": "http://h:1/v1"}
    a, b = environments_of(["a", "b"], "--set", "b:x.y=true")
    assert (dict(a.overrides), dict(b.overrides)) == ({}, {"x.y": True})


@pytest.mark.parametrize(
    ("names", "agent", "settings", "said"),
    [
        (["a", "b"], "x", [], "--agent "),
        (["a", "b"], None, ["x=1"], "ENV:KEY=VALUE.*ENV:@FILE.* a, b"),
        (["a", "b"], None, ["c:x=1"], "ENV:KEY=VALUE.* a, b"),
        (["a"], None, ["x"], "write KEY=VALUE or @FILE"),
        (["a"], None, ["@"], "write KEY=VALUE or @FILE"),
        (["a"], None, ["@no-such-file.yaml"], "No such file"),
        (["a"], None, ["x=["], "YAML"),
    ],
)
def test_wrong_environment_options(
    names: list[str], agent: str | None, settings: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^[^\n]*{said}[^\n]*$"):
        environments_of(names, *(("--agent", agent) if agent else ()), *settings_of(*settings))


def rollout(environment: str, reward: float | None, error: str | None = None) -> Rollout:
    failed = RolloutError(kind="policy", message=error, type="PolicyError") if error else None
    status = "failed" if error else "completed"
    return Rollout(id="x", environment=environment, agent="a", status=status, reward=reward, error=failed)


def count(progress: RunProgress, one: Rollout, repeat: int) -> None:
    if one.error is None:
        progress.count(as_collected(one, repeat))
    else:
        progress.count_failure(as_collected(one, repeat), final=True)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    progress, tasks = RunProgress(), CollectedTasks()
    progress.start()
    reason = {"failure_kind": "judge_failed", "failure_reason": "404 at http://h:1/ng-rollout/{}/v1"}
    results = [{key: text.format(id_) for key, text in reason.items()} for id_ in "xy"]
    for number, one in enumerate(
        (
            rollout("b", 1.0),
            rollout("b", 0.0),
            rollout("b", None),
            rollout("a", None, "401\n  no key"),
            rollout("b", 1.0).model_copy(update={"status": "truncated"}),
            *(rollout("a", 0.0).model_copy(update={"status": "masked", "result": each}) for each in results),
        )
    ):
        count(progress, one, number)
        add(tasks, as_collected(one, number, str(number % 2)))
    rows = summary_rows(tasks)
    print_results(rows, replayed=False)
    out, _ = capsys.readouterr()
    head, a, b, whole, account = out.splitlines()
    counts = ["environment", "rollouts", "failed", "masked", "unscored", "truncated"]
    bounds = ["if", "failed", "0", "to", "1"]
    assert head.split() == [*counts, "tasks", "scored", "tasks", "mean", "±", "se", *bounds, "pass@1"]
    assert a.split() == ["a", "3", "1", "2", "0", "0", "2", "0", "-", "-", "-"]
    assert b.split() == ["b", "4", "0", "0", "1", "1", "2", "2", "0.667", "±0.444", "-", "0.500"]
    assert whole.split()[:2] == ["all", "7"]
    reasons = {"masked: judge_failed 404 at http://h:1/v1": 2, "PolicyError: 401 no key": 1}
    assert account == "7 rollouts: 2 right, 1 wrong, 1 unscored, 2 masked; 1 failed (1 by policy)"
    run: Any = SimpleNamespace(
        progress=progress, replayed=False, directory=None, plan=SimpleNamespace(invalid=())
    )
    summary = run_output(run, rows, (), None, interrupted=True, error=None)
    assert {*summary.environments} == {"a", "b"}
    assert summary.environments["b"]["mean_reward"] == pytest.approx(2 / 3)
    counted = {"rollouts": 4, "failed": 0, "masked": 0, "unscored": 1, "truncated": 1}
    assert summary.environments["b"].items() >= counted.items()
    assert (summary.environments["a"]["failed"], summary.environments["a"]["masked"]) == (1, 2)
    assert summary.environments["a"]["mean_reward"] is None
    assert (summary.reasons, summary.interrupted) == (reasons, True)
    assert summary.overall is not None
    assert (summary.overall["environment"], summary.overall["rollouts"]) == ("all", 7)


def row_line(text: str) -> str:
    return json.dumps({"responses_create_params": {"input": text}})


def source(path: Path, lines: list[str], name: str, limit: int | None = None) -> RowSource:
    path.write_text("".join(f"{line}\n" for line in lines))
    return RowSource(open_rows(str(path), environment=None), name, limit)


@pytest.fixture
def recording(tmp_path: Path) -> list[Recording]:
    said = {"type": "message", "role": "assistant", "content": "a"}
    record = {"responses_create_params": {"input": "recorded"}, "response": {"id": "r", "output": [said]}}
    (tmp_path / "r.jsonl").write_text(json.dumps(record) + "\n")
    return recordings_of(ReplayEndpoint(rollouts=(str(tmp_path / "r.jsonl"),)))


def test_rows_without_a_recording_are_left_out_and_unreadable_ones_stay(
    tmp_path: Path, recording: list[Recording]
) -> None:
    lines = [row_line("other"), row_line("recorded"), "{", row_line("recorded")]
    notes: list[str] = []
    found = only_recorded([source(tmp_path / "rows.jsonl", lines, "env", limit=2)], recording, notes.append)
    (note,) = notes
    assert note.startswith("env: 1 of 4 rows ")
    plan = RolloutPlan(found)
    assert [each.row.line for each in plan.rollouts()] == [2]
    assert [error.line for error in plan.invalid] == [3]


def test_a_missing_recording_is_refused_before_anything_starts() -> None:
    result = CliRunner().invoke(cli, ["run", "mcqa", "--replay-file", "gone.jsonl"], standalone_mode=False)
    assert isinstance(result.exception, ConfigError)
    assert "--replay-file 'gone.jsonl'" in str(result.exception)


def test_a_directory_of_a_run_stands_for_its_rollouts(tmp_path: Path) -> None:
    for shard in ("shard-1-of-2", "shard-2-of-2"):
        (tmp_path / "run" / shard).mkdir(parents=True)
        for name in ("run.json", "rollouts.jsonl"):
            (tmp_path / "run" / shard / name).touch()
    (file := tmp_path / "more.jsonl").touch()
    shards = [str(tmp_path / "run" / f"shard-{number}-of-2" / "rollouts.jsonl") for number in (1, 2)]
    assert replay_files([str(tmp_path / "run"), str(file)]) == (*shards, str(file))
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        replay_files([str(tmp_path)])


def test_an_environment_without_a_recording_of_its_rows_is_named(
    tmp_path: Path, recording: list[Recording]
) -> None:
    one = source(tmp_path / "one.jsonl", [row_line("recorded")], "one")
    two = source(tmp_path / "two.jsonl", [row_line("other")], "two")
    with pytest.raises(ConfigError, match=r"\btwo\b.*-b http.*--replay-file FILE"):
        only_recorded([one, two], recording, print)
    empty = source(tmp_path / "empty.jsonl", [], "empty")
    with pytest.raises(DataError, match=r"empty\.jsonl"):
        only_recorded([one, empty], recording, print)


@pytest.mark.parametrize("command", [("run",), ("run", "-o", "run")])
def test_rows_without_an_agent_get_advice_that_the_command_takes(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymgate.cli.run_spec.open_catalog", lambda *args, **options: None)
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{row_line('a')}\n")
    result = CliRunner().invoke(cli, [*command, str(path)], standalone_mode=False)
    assert isinstance(result.exception, ConfigError)
    advised = {word for word in str(result.exception).split() if word.startswith("--")}
    known = {
        name
        for each in importlib.import_module(f"gymgate.cli.{command[0]}").command.params
        for name in each.opts
    }
    assert advised
    assert advised <= known
