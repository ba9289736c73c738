"""A run that an earlier gymgate wrote is resumed, aggregated, exported and reported.

`earlier_run` was written before rollouts had limits, segments and outcomes: five rows, replayed, one of which failed for
good. `@DIRECTORY@` stands for the directory that holds it.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner

from gymgate.cli.aggregate import command as aggregate
from gymgate.cli.export import command as export
from gymgate.cli.report import command as report
from gymgate.core.config import ReplayEndpoint, RolloutLimits
from gymgate.core.errors import ConfigError
from gymgate.gym.row_sources import RowSource, open_rows
from gymgate.rollouts import Rollout, outcome_of
from gymgate.runs.collected.store import open_run
from gymgate.runs.described.pace import Pace
from gymgate.runs.described.plan import PlannedRollout, RolloutPlan
from gymgate.runs.described.settings import extent_of, settings_of
from gymgate.runs.stored.layout import ROLLOUTS
from gymgate.runs.stored.record import CollectedRollout, read_values
from support.collecting import made_up_run

EARLIER = Path(__file__).with_name("earlier_run")
ENVIRONMENT = "example_single_tool_call"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(EARLIER, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run" / "run.json"
    run.write_text(run.read_text().replace("@DIRECTORY@", str(tmp_path)))
    monkeypatch.chdir(tmp_path)  # its rows are named by a relative path
    return tmp_path


def settings(directory: Path, **limits: Any) -> dict[str, Any]:
    policy = ReplayEndpoint(rollouts=(str(directory / "recordings.jsonl"),))
    return settings_of(policy, RolloutLimits(**limits), ["rows.jsonl"])


def plan(repeats: int) -> RolloutPlan:
    return RolloutPlan([RowSource(open_rows("rows.jsonl", environment=None), ENVIRONMENT)], repeats=repeats)


async def test_it_is_resumed(directory: Path) -> None:
    """With a second repeat: what is there is not run again, and what failed permanently stays so."""
    ran: list[tuple[int, int]] = []

    async def run_one(planned: PlannedRollout) -> Rollout:
        ran.append((planned.row.line, planned.identity.repeat))
        return Rollout(id="x", environment=ENVIRONMENT, agent="a", status="completed", reward=1.0)

    wanted = plan(repeats=2)
    with open_run(directory / "run", settings(directory), extent_of(wanted)) as run:
        assert (len(run.done), len(run.given_up), run.repaired) == (4, 1, 0)
    made = made_up_run(wanted, run_one, output=directory / "run", pace=Pace(2))
    made.settings = lambda: settings(directory)  # type: ignore[method-assign]
    await made.run()
    assert (made.progress.total, made.progress.resumed, made.progress.given_up_before) == (10, 5, 1)
    assert sorted(ran) == [(line, 1) for line in range(1, 6)]
    found = [CollectedRollout.model_validate(value) for _, value in read_values(directory / "run" / ROLLOUTS)]
    assert len({rollout.identity for rollout in found}) == len(found) == 9
    assert [outcome_of(rollout).reward for rollout in found[:4]].count(1.0) == 3
    assert sum(len(rollout.policy_calls) for rollout in found[:4]) == 7
    assert {rollout.source for rollout in found[4:]} == {str(directory / "rows.jsonl")}, (
        "found from elsewhere, too"
    )


def test_other_settings_are_refused(directory: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"limits\.max_calls: .*\b3 "),
        open_run(directory / "run", settings(directory, max_calls=3), extent_of(plan(1))),
    ):
        pass


def test_it_is_aggregated_and_reported(directory: Path) -> None:
    done = CliRunner().invoke(aggregate, ["run", "--json"])
    assert done.exit_code == 0, done.output
    metrics = orjson.loads(done.stdout)
    [row] = metrics["environments"]
    assert (row["tasks"], row["rollouts"], row["scored"], row["failed"]) == (5, 5, 4, 1)
    assert (row["pass@1"], metrics["replayed"]) == (0.75, True)
    done = CliRunner().invoke(report, ["run"])
    assert done.exit_code == 0, done.output
    page = (directory / "run" / "report.html").read_text()
    assert f" on {ENVIRONMENT}, 2026-11-22</title>" in page
    assert "'nobody'" in page.replace(r"\u0027", "'")


@pytest.mark.parametrize(
    ("form", "name", "count"),
    [("dataset", "d.jsonl", 5), ("gym", "g.jsonl", 4), ("rows", "r.jsonl", 4), ("traces", "traces.jsonl", 4)],
)
def test_it_is_exported(directory: Path, form: str, name: str, count: int) -> None:
    if form == "traces":
        pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    bounds = ["--keep", "0..1"] if form == "rows" else []
    done = CliRunner().invoke(export, ["run", "--to", form, "-o", name, *bounds])
    assert done.exit_code == 0, done.output
    lines = [orjson.loads(line) for line in (directory / name).read_bytes().splitlines()]
    assert len(lines) == count
    if form == "gym":
        inputs = (directory / "g_materialized_inputs.jsonl").read_bytes().splitlines()
        assert len(inputs) == 4


def test_gyms_form_numbers_a_tasks_rollouts_by_seed_and_repeat(directory: Path) -> None:
    [first, *_] = [orjson.loads(line) for line in Path("run", ROLLOUTS).read_bytes().splitlines()]
    lines = [{**first, "seed": seed} for seed in (7, 3)]
    Path("run", ROLLOUTS).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    CliRunner().invoke(export, ["run", "--to", "gym", "-o", "g.jsonl"], catch_exceptions=False)
    numbers = [orjson.loads(line)["_ng_rollout_index"] for line in Path("g.jsonl").read_bytes().splitlines()]
    assert numbers == [1, 0]


def test_rows_are_exported_by_pass_rate(directory: Path) -> None:
    """The easiest first; rows of equal rates keep their order, and one without any reward is left out."""
    lines = [orjson.loads(line) for line in Path("run", ROLLOUTS).read_bytes().splitlines()]
    for line, reward in zip(lines, (0.25, 1.0, 0.25, None), strict=True):
        line["reward"] = reward
    Path("run", ROLLOUTS).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    exported = {}
    for order in ("input", "pass-rate"):
        CliRunner().invoke(
            export, ["run", "--to", "rows", "-o", "r.jsonl", "--order", order], catch_exceptions=False
        )
        exported[order] = Path("r.jsonl").read_bytes().splitlines()
    rates = {line["task"]: line["reward"] for line in lines if line["reward"] is not None}
    assert len(exported["input"]) == 3
    easiest = next(number for number, task in enumerate(sorted(rates)) if rates[task] == 1.0)
    others = [row for number, row in enumerate(exported["input"]) if number != easiest]
    assert exported["pass-rate"] == [exported["input"][easiest], *others]
    done = CliRunner().invoke(export, ["run", "--to", "gym", "-o", "g.jsonl", "--order", "pass-rate"])
    assert isinstance(done.exception, ConfigError)


FORMS = [("dataset", "d.jsonl"), ("gym", "g.jsonl"), ("rows", "r.jsonl"), ("traces", "traces.jsonl")]


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_what_is_in_two_runs_is_exported_once_or_not_at_all(directory: Path, form: str, name: str) -> None:
    if form == "traces":
        pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    shutil.copytree("run", "again")
    arguments = ["run", "again", "--to", form, "-o", name]
    done = CliRunner().invoke(export, arguments)
    assert isinstance(done.exception, ConfigError), done.output
    assert "4 rollouts" in str(done.exception)
    assert not (directory / name).exists()
    done = CliRunner().invoke(export, [*arguments, "--overlap", "first"], catch_exceptions=False)
    assert "4 rollouts" in done.stderr
    failed = form == "dataset"  # a row of that table, too
    assert len((directory / name).read_bytes().splitlines()) == 4 + failed


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_two_policies_are_not_exported_as_one(directory: Path, form: str, name: str) -> None:
    if form == "traces":
        pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    shutil.copytree("run", "other")
    described = orjson.loads((directory / "other" / "run.json").read_bytes())
    described["settings"]["policy"] = {"type": "http", "model": "another"}
    (directory / "other" / "run.json").write_bytes(orjson.dumps(described))
    rollouts = directory / "other" / ROLLOUTS
    rollouts.write_text(rollouts.read_text().replace('"repeat":0', '"repeat":1'))
    done = CliRunner().invoke(export, ["run", "other", "--to", form, "-o", name])
    assert isinstance(done.exception, ConfigError), done.output
    assert "'another'" in str(done.exception)
    assert not (directory / name).exists()


@pytest.mark.parametrize("form", ["gym", "rows"])
def test_a_file_without_input_rows_is_refused(directory: Path, form: str) -> None:
    value = {"_ng_task_index": 0, "_ng_rollout_index": 0, "agent_ref": {"name": "a"}, "reward": 1.0}
    (directory / "theirs.jsonl").write_bytes(orjson.dumps(value) + b"\n")
    (directory / "ours.jsonl").write_text("kept\n")
    done = CliRunner().invoke(export, ["theirs.jsonl", "--to", form, "-o", "ours.jsonl"])
    assert isinstance(done.exception, ConfigError), done.output
    assert "theirs.jsonl" in str(done.exception)
    assert (directory / "ours.jsonl").read_text() == "kept\n"


def test_a_report_counts_what_is_in_two_runs_once(directory: Path) -> None:
    shutil.copytree("run", "again")
    done = CliRunner().invoke(report, ["run", "again"])
    assert isinstance(done.exception, ConfigError), done.output
    done = CliRunner().invoke(report, ["run", "again", "-o", "r.html", "--overlap", "first"])
    assert done.exit_code == 0, done.output
    page = (directory / "r.html").read_text()
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    histograms = [part["histogram"] for part in orjson.loads(data) if "histogram" in part]
    assert {each["title"]: each["count"] for each in histograms}["Reward"] == 4


def test_rows_of_several_environments_name_their_agents(directory: Path) -> None:
    """Rows of two environments in one file, whose rollouts were told apart by environment alone."""
    rollouts = directory / "run" / ROLLOUTS
    lines = [value for _, value in read_values(rollouts)]
    rows = [orjson.loads(line) for line in (directory / "rows.jsonl").read_bytes().splitlines()]
    assert not any("agent_ref" in rows[line["line"] - 1] for line in lines)
    for environments in ([ENVIRONMENT] * 4, [ENVIRONMENT, "other"] * 2):
        changed = [
            {**line, "environment": environment, "agent": f"{environment}_agent"}
            for line, environment in zip(lines, environments, strict=True)
        ]
        rollouts.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in changed))
        done = CliRunner().invoke(export, ["run", "--to", "rows", "-o", "kept.jsonl"])
        assert done.exit_code == 0, done.output
        kept = [orjson.loads(line) for line in (directory / "kept.jsonl").read_bytes().splitlines()]
        agents = Counter((row.get("agent_ref") or {}).get("name") for row in kept)
        several = len(set(environments)) > 1
        ran_by = "kept.jsonl" if several else f"{ENVIRONMENT} --data kept.jsonl"
        assert f"next: gymgate run {ran_by} -b URL" in done.stderr
        assert agents == ({f"{ENVIRONMENT}_agent": 2, "other_agent": 2} if several else {None: 4})
