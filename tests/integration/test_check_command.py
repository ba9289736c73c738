"""The command `gymgate check`: what it is asked for, results that outlive it, endpoints of judges, its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gymgate.check
from gymgate.check import CheckRequest, CheckResult, RowResult
from gymgate.check.record.files import load_record, save_record
from gymgate.cli import cli
from gymgate.config import HTTPEndpoint
from gymgate.errors import ConfigError
from support.checks import PARIS, recorded
from support.faulty import RECORDED_CONFIG, with_recordings
from support.json_output import read_output
from support.stacks import SIMPLE
from support.upstream import scripted_chat

pytestmark = [pytest.mark.gym, pytest.mark.timeout(900)]  # the first use of a release installs it


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[CheckRequest]:
    """The jobs that the command would run; each fails, or matches if its memory is more than 8 GB."""
    jobs: list[CheckRequest] = []

    async def check_all(wanted: Sequence[CheckRequest], *, done: Any, **settings: Any) -> list[CheckResult]:
        jobs.extend(wanted)
        checks = [made(job) for job in wanted]
        for job, check in zip(wanted, checks, strict=True):
            done(job, check)
        return checks

    monkeypatch.setattr(gymgate.check, "check_all", check_all)
    return jobs


def made(job: CheckRequest, **fields: Any) -> CheckResult:
    kind, _, name = job.environment.rpartition("/")
    verdict = "match" if job.memory_gb > 8 else "failed"
    return job.result(0.0, **{"environment": name, "kind": kind, "verdict": verdict, **fields})


def check(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["check", *arguments])


@pytest.mark.parametrize(
    ("arguments", "kind", "version", "count"),
    [
        ([], "resources_servers", "0.7.0", 145),
        (["--kind", "environment"], "environments", "0.7.0", 49),
        (["--kind", "agent"], "responses_api_agents", "0.7.0", 13),
        (["--gym", "0.6.0"], "resources_servers", "0.6.0", 116),
    ],
)
def test_all_of_a_kind_of_a_release(
    asked: list[CheckRequest], arguments: list[str], kind: str, version: str, count: int
) -> None:
    done = check("--all", *arguments)
    assert done.exit_code == 1, "one that failed is the command's failure"
    names = [job.environment for job in asked]
    assert len({*names}) == len(names) == count
    assert {name.partition("/")[0] for name in names} == {kind}
    assert {job.version for job in asked} == {version}
    assert f"{count} environments: {count} failed; 0 returned a reward" in done.output


def test_an_unknown_sandbox_is_refused_before_anything_starts(asked: list[CheckRequest]) -> None:
    done = check("calendar", "--sandbox", "nosuch")
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("there is no sandbox provider 'nosuch'")
    assert not asked


def test_settings_endpoints_and_limits_reach_the_job(asked: list[CheckRequest], tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("a: {b: 2}")
    settings = ("--set", "x.y=1", "--set", f"@{tmp_path}/more.yaml", "--env-var", "HOME")
    limits = ("--start-timeout", "1", "--timeout", "2", "--environment-timeout", "3", "--memory", "4")
    check("calendar", *settings, "--judge", "judge=http://h/v1", "--judge", "sim=policy", *limits)
    (job,) = asked
    assert (job.environment, dict(job.overrides), job.env_vars) == (
        "resources_servers/calendar",
        {"x.y": 1, "a.b": 2},
        ("HOME",),
    )
    assert dict(job.models) == {"judge": HTTPEndpoint(base_url="http://h/v1"), "sim": "policy"}
    assert (job.start_timeout_s, job.row_timeout_s, job.timeout_s, job.memory_gb) == (1, 2, 3, 4)


def test_a_record_of_the_same_options_that_did_not_fail_is_not_made_again(
    asked: list[CheckRequest], tmp_path: Path
) -> None:
    store = tmp_path / "deep"
    both = ["resources_servers/calendar", "resources_servers/mcqa"]
    for arguments, again in (
        (["--memory", "9"], both),
        (["--memory", "9"], []),
        (["--memory", "10"], both),
        (["--memory", "10", "--gym", "0.6.0"], both),
        (["--memory", "4"], both),
        (["--memory", "4"], both),  # they failed
    ):
        asked.clear()
        done = check("calendar", "mcqa", "--record", str(store), *arguments)
        assert [job.environment for job in asked] == again, arguments
        assert ("not checked again: 2 of 2" in done.stderr) == (not again)
    assert len([*store.rglob("*.json")]) == 4, "of each release"


def test_what_is_kept_is_shown_and_judged_again(asked: list[CheckRequest], tmp_path: Path) -> None:
    arguments = ("calendar", "--record", str(tmp_path), "--memory", "9", "--deterministic")
    first, second = check(*arguments), check(*arguments)
    assert len(asked) == 1
    for done in (first, second):
        assert done.exit_code == 1
        assert "calendar: match [" in done.stdout
        assert "threshold not met: --deterministic: not measured" in done.stderr


def test_json_is_the_records(asked: list[CheckRequest], tmp_path: Path) -> None:
    done = check("calendar", "mcqa", "--json", "--memory", "9", "--record", str(tmp_path))
    results = read_output("check", done.stdout)
    assert [each["environment"] for each in results] == ["calendar", "mcqa"]
    (path,) = tmp_path.rglob("mcqa-*.json")
    assert json.loads(path.read_text()) == results[1]


def test_rewards_by_stand_in_are_counted_and_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = ({"rewarded": True}, {"rewarded_by_stand_in": True}, {})

    async def check_all(wanted: Sequence[CheckRequest], **settings: Any) -> list[CheckResult]:
        return [made(job, **fields) for job, fields in zip(wanted, rewards, strict=True)]

    monkeypatch.setattr(gymgate.check, "check_all", check_all)
    done = check("calendar", "mcqa", "equivalence_rule")
    assert "2 returned a reward, 1 of them with a stand-in for the judge" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name environments, or give --all"),
        (["mcqa", "calendar", "--set", "a=1"], "name exactly one"),
        (["no_such_environment"], "no environment 'no_such_environment'"),
    ],
)
def test_what_cannot_be_checked_is_one_line(arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "gymgate", "check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert said in done.stderr


def test_a_check_that_is_killed_has_kept_what_it_had_and_goes_on_there(tmp_path: Path) -> None:
    """Of two at once, one hangs; the other one's result is on disk before the command ends."""
    hanging, store = with_recordings(tmp_path), tmp_path / "records"
    record = store / "resources_servers" / f"{SIMPLE}-0.7.0.json"
    hanging.write_text(RECORDED_CONFIG.replace("fault: none", "fault: hang"))
    command = [sys.executable, "-m", "gymgate", "check"]
    with subprocess.Popen(
        [*command, str(hanging), SIMPLE, "--jobs", "2", "--record", str(store)],
        stderr=subprocess.DEVNULL,
    ) as killed:
        deadline = time.monotonic() + 140  # before the hanging one's own is over
        while not record.exists() and time.monotonic() < deadline:
            assert killed.poll() is None
            time.sleep(0.05)
        killed.kill()
    kept = load_record(record)
    assert kept is not None
    assert (kept.environment, kept.verdict) == (SIMPLE, "match")
    done = subprocess.run(
        [*command, SIMPLE, "--record", str(store)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "not checked again: 1 of 1" in done.stderr
    assert load_record(record) == kept


def test_an_endpoint_of_the_users_judges(tmp_path: Path) -> None:
    """The record does not hold what its judge said; with an endpoint it is scored."""
    config = with_recordings(tmp_path, recorded("capital of France?", "Lyon", 1.0))
    questions: list[str] = []

    def judge(question: str) -> str:
        questions.append(question)
        return "No, it is Paris."

    with scripted_chat(judge) as url:
        arguments = ["--set", "faulty.resources_servers.faulty.fault=judge", "--judge", f"a_judge=m@{url}"]
        command = [sys.executable, "-m", "gymgate", "check", str(config), *arguments, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(done.stdout)
    assert questions == ["Is this right: Lyon"]
    assert (result["verdict"], result["matched"], result["compared"]) == ("match", 1, 1)
    assert result["rows"][0]["judged_by"] == "endpoint"


def test_a_reward_that_differs_is_shown_and_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(
        RowResult(recording=f"r:{number}", recorded=1.0, reward=0.5, verdict="differs")
        for number in range(1, 8)
    )

    async def check_all(wanted: Sequence[CheckRequest], *, done: Any, **settings: Any) -> list[CheckResult]:
        result = made(wanted[0], verdict="differs", rows=rows)
        done(wanted[0], result)
        return [result]

    monkeypatch.setattr(gymgate.check, "check_all", check_all)
    done = check("calendar")
    assert done.exit_code == 1
    assert "  r:5: expected 1, got 0.5\n  and 2 more\n" in done.output


@pytest.mark.parametrize(
    ("code", "fault", "verdict", "shown"),
    [
        ("", "name", "failed 0/1", ["text = txt", "NameError: name 'txt' is not defined"]),
        ("import nosuchmodule", "none", "failed (package: nosuchmodule)", ["import nosuchmodule"]),
    ],
)
def test_the_author_of_a_server_sees_its_exception_and_its_output(
    tmp_path: Path, code: str, fault: str, verdict: str, shown: list[str]
) -> None:
    config, logs = with_recordings(tmp_path, recorded("capital of France?", "Paris", 1.0)), tmp_path / "logs"
    app = config.parents[1] / "app.py"
    app.write_text(f"{code}\n{app.read_text()}")
    arguments = [
        str(config),
        "--set",
        f"faulty.resources_servers.faulty.fault={fault}",
        "--logs",
        str(logs),
        "-v",
    ]
    command = [sys.executable, "-m", "gymgate", "check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    first, *more = done.stdout.splitlines()
    assert first.startswith(f"faulty: {verdict}")
    assert more[0].startswith(f'  File "{app}", line ')
    assert all(any(text in line for line in more) for text in shown)
    output = (logs / "faulty" / "faulty.log").read_text()
    assert shown[-1] in output
    assert output in done.stderr
    assert {path.suffix for path in (logs / "faulty").iterdir()} == {".log"}


def test_rows_alone_are_read_and_added_to_the_record_that_is_there(tmp_path: Path) -> None:
    config = with_recordings(tmp_path, PARIS)
    data = config.parents[1] / "data"
    rows = (data / "example.jsonl").read_text()
    (data / "train.jsonl").write_text(rows + rows.splitlines()[0])
    (data / "validation.jsonl").write_text(rows)
    store = tmp_path / "records"
    done = check(str(config), "--rows-only", "--record", str(store), "--clean-rows")
    assert done.exit_code == 1
    assert done.stdout.splitlines() == [
        "faulty: 7 rows; duplicates: 1; answers in prompts: not looked for; rows in several splits: 2",
        "  1 of 7 rows equal an earlier row of their file: train:1 = train:3",
        "  rows in several splits: 2: train:1 = validation:1; train:2 = validation:2",
    ]
    path = store / "config" / "faulty-0.7.0.json"
    record = load_record(path)
    assert record is not None
    assert (record.verdict, record.detail) == ("incomplete", "only its rows were read")
    measured = record.model_copy(update={"verdict": "match", "machine": "here", "data": None})
    save_record(path, measured)
    (data / "train.jsonl").write_text(rows)
    done = check(str(config), "--rows-only", "--record", str(store), "--json")
    assert done.exit_code == 0
    again = load_record(path)
    assert again is not None
    assert again.data is not None
    assert (again.verdict, again.machine, again.data.duplicates) == ("match", "here", 0)
    assert json.loads(done.stdout) == [again.model_dump(mode="json")]


def test_rows_of_ones_own_are_read_instead_of_the_packaged_ones(tmp_path: Path) -> None:
    (path := tmp_path / "train.jsonl").write_text('{"a": 1}\n{"a": 1}\n')
    done = check("mcqa", "--rows-only", "--rows-file", str(path))
    assert done.exit_code == 0
    assert done.stdout.splitlines()[1] == (
        "  1 of 2 rows equal an earlier row of their file: train:1 = train:2"
    )


def test_rows_only_adds_to_the_record_that_ships(tmp_path: Path) -> None:
    assert check("multichallenge", "--rows-only", "--record", str(tmp_path)).exit_code == 0
    record = load_record(tmp_path / "resources_servers" / "multichallenge-0.7.0.json")
    assert record is not None
    assert record.measured
    assert record.data is not None
    assert record.data.duplicates == 2


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["mcqa", "--rows-file", "ROWS"], "--rows-file names rows for --rows-only; give both"),
        (["mcqa", "calendar", "--rows-only", "--rows-file", "ROWS"], "--rows-file is for one environment"),
        (["mcqa", "--rows-only", "--rows-file", "no.jsonl"], "no file of rows at 'no.jsonl'"),
        (["mcqa", "--rows-only", "--rows-file", "ROWS", "--record", "r"], "a record is of the packaged rows"),
        (["mcqa", "--rows-only", "-b", "http://h/v1"], "--rows-only runs no row; leave -b out"),
    ],
)
def test_options_that_mean_nothing_beside_rows_only_are_refused(
    tmp_path: Path, arguments: list[str], wrong: str
) -> None:
    (path := tmp_path / "rows.jsonl").write_text("{}")
    done = check(*(str(path) if each == "ROWS" else each for each in arguments))
    assert done.exit_code != 0
    assert wrong in str(done.exception)
