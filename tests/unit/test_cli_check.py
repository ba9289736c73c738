"""The command `gymgate check`: what it asks for, which records it keeps, what it shows, its exit code."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner

import gymgate.quality
from gymgate.cli import cli
from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import ConfigError
from gymgate.quality import CheckRequest, CheckResult, RowResult
from gymgate.quality.model import SectionName
from gymgate.quality.record.measure import MEASUREMENTS
from gymgate.quality.record.storage import load_record, record_path, shipped_record
from gymgate.quality.sections import Cost, Oracle, Shape
from support.json_output import read_output


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

    monkeypatch.setattr(gymgate.quality, "check_all", check_all)
    return jobs


def made(job: CheckRequest, **fields: Any) -> CheckResult:
    kind, _, name = job.name.rpartition("/")
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
    names = [job.name for job in asked]
    assert len({*names}) == len(names) == count
    assert {name.partition("/")[0] for name in names} == {kind}
    assert {job.stack.runtime.version for job in asked} == {version}
    assert f"{count} environments: {count} failed; 0 " in done.output


def test_settings_endpoints_and_limits_reach_the_job(
    asked: list[CheckRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask_judges(judges: Any, wait_s: float, log: Any) -> Any:
        return judges

    monkeypatch.setattr("gymgate.cli.check.ask_judges", ask_judges)
    (tmp_path / "more.yaml").write_text("a: {b: 2}")
    settings = ("--set", "x.y=1", "--set", f"@{tmp_path}/more.yaml", "--env-var", "HOME")
    limits = ("--start-timeout", "1", "--timeout", "2", "--environment-timeout", "3", "--memory", "4")
    check("calendar", *settings, "--judge", "judge=http://h/v1", "--judge", "sim=policy", *limits)
    (job,) = asked
    assert (job.name, dict(job.environment.overrides), job.stack.env_vars) == (
        "resources_servers/calendar",
        {"x.y": 1, "a.b": 2},
        ("HOME",),
    )
    assert dict(job.stack.models) == {"judge": HTTPEndpoint(base_url="http://h/v1"), "sim": "policy"}
    assert (job.stack.start_timeout_s, job.limits.timeout_s) == (1, 2)
    assert (job.timeout_s, job.memory_gb) == (3, 4)


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
        assert [job.name for job in asked] == again, arguments
        assert ("2 of 2" in done.stderr) == (not again)
    assert len([*store.rglob("*.json")]) == 4, "of each release"


def test_what_is_kept_is_shown_and_judged_again(asked: list[CheckRequest], tmp_path: Path) -> None:
    arguments = ("calendar", "--record", str(tmp_path), "--memory", "9", "--deterministic")
    first, second = check(*arguments), check(*arguments)
    assert len(asked) == 1
    for done in (first, second):
        assert done.exit_code == 1
        assert "calendar: match [" in done.stdout
        assert "--deterministic: not measured" in done.stderr


def test_json_is_the_records(asked: list[CheckRequest], tmp_path: Path) -> None:
    done = check("calendar", "mcqa", "--json", "--memory", "9", "--record", str(tmp_path))
    results = read_output("check", done.stdout)
    assert [each["environment"] for each in results] == ["calendar", "mcqa"]
    (path,) = tmp_path.rglob("mcqa-*.json")
    assert json.loads(path.read_text()) == results[1]


def test_rewards_by_stand_in_are_counted_and_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = ({"rewarded": True}, {"rewarded_by_stand_in": True}, {})

    async def check_all(wanted: Sequence[CheckRequest], *, done: Any, **settings: Any) -> list[CheckResult]:
        results = [made(job, **fields) for job, fields in zip(wanted, rewards, strict=True)]
        for job, result in zip(wanted, results, strict=True):
            done(job, result)
        return results

    monkeypatch.setattr(gymgate.quality, "check_all", check_all)
    done = check("calendar", "mcqa", "equivalence_rule")
    assert re.search("2 returned .*, 1 of them", done.stdout)


def test_a_reward_that_differs_is_shown_and_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(
        RowResult(recording=f"r:{number}", recorded=1.0, reward=0.5, verdict="differs")
        for number in range(1, 8)
    )

    async def check_all(wanted: Sequence[CheckRequest], *, done: Any, **settings: Any) -> list[CheckResult]:
        result = made(wanted[0], verdict="differs", rows=rows)
        done(wanted[0], result)
        return [result]

    monkeypatch.setattr(gymgate.quality, "check_all", check_all)
    done = check("calendar")
    assert done.exit_code == 1
    assert "  r:5: expected 1, got 0.5\n  and 2 more\n" in done.output


@pytest.mark.parametrize(
    ("fields", "is_said"),
    [({"evidence": "it died"}, True), ({"traceback": "line 1", "evidence": "x"}, False), ({}, False)],
)
def test_where_no_exception_is_shown_the_logs_are_the_next_step(
    fields: dict[str, str], is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check_all(wanted: Sequence[CheckRequest], *, done: Any, **settings: Any) -> list[CheckResult]:
        result = made(wanted[0], verdict="failed", **fields)
        done(wanted[0], result)
        return [result]

    monkeypatch.setattr(gymgate.quality, "check_all", check_all)
    assert ("calendar -v" in check("calendar").output) is is_said


def test_every_section_that_is_measured_can_be_chosen() -> None:
    assert {*get_args(SectionName)} == {*MEASUREMENTS}


def test_a_section_is_added_to_the_record_that_ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rest of the record stays, recordings are replayed only for sections that need them; a second command finds it done."""
    wanted: list[CheckRequest] = []

    async def check_all(jobs: Sequence[CheckRequest], *, done: Any, **settings: Any) -> list[CheckResult]:
        wanted.extend(jobs)
        sections = {"shape": Shape(rows=3, recordings=0), "missing": {"cost": "no time"}}
        checks = [made(job, verdict="incomplete", machine="here", **sections) for job in jobs]
        for job, check in zip(jobs, checks, strict=True):
            done(job, check)
        return checks

    monkeypatch.setattr(gymgate.quality, "check_all", check_all)
    arguments = ("calendar", "--record", str(tmp_path), "--section", "shape", "--json")
    (printed,) = read_output("check", check(*arguments).stdout)
    (job,) = wanted
    assert (job.measure, job.sections, job.replay) == (True, ("shape",), False)
    shipped = shipped_record("resources_servers", "calendar", "0.7.0")
    record = load_record(record_path(tmp_path, "resources_servers/calendar-0.7.0"))
    assert shipped is not None
    assert record is not None
    assert record.model_dump(mode="json") == printed
    assert record == shipped.model_copy(
        update={"shape": Shape(rows=3, recordings=0), "settings": job.settings}
    )
    check(*arguments)
    assert len(wanted) == 1
    done = check("wordle", "--record", str(tmp_path), "--section", "cost")
    assert wanted[1].replay
    assert "cost (no time)" in done.stdout


def test_a_section_that_was_not_measured_leaves_the_one_that_is_there() -> None:
    known = made(CheckRequest.model_validate({"environments": "e"})).model_copy(
        update={"cost": Cost(rest_mb=1)}
    )
    other = made(CheckRequest.model_validate({"environments": "e"}), missing={"all": "no servers"})
    record = known.with_sections(["cost", "shape"], other)
    assert record.cost == known.cost
    assert record.missing == {"shape": "no servers"}


@pytest.mark.parametrize(
    ("fields", "oracle"),
    [
        ({"verdict": "blocked", "need": "docker"}, Oracle(reason="needs a download or container")),
        ({"verdict": "blocked", "need": "judge"}, Oracle(reason="needs a judge")),
        ({"verdict": "incomplete", "detail": "no config"}, Oracle(reason="other", detail="no config")),
        ({"verdict": "match", "machine": "here"}, None),
    ],
)
def test_why_nothing_was_tried_where_nothing_could_be_run(
    fields: dict[str, Any], oracle: Oracle | None
) -> None:
    assert (
        made(CheckRequest.model_validate({"environments": "e", "measure": True}), **fields).oracle == oracle
    )


@pytest.mark.parametrize("section", ["shape", "oracle"])
def test_a_check_of_a_section_that_does_not_start_says_nothing_of_right_answers(section: str) -> None:
    """They were not asked for, or a record has them from a check that did start."""
    request = CheckRequest.model_validate({"environments": "e", "measure": True, "sections": (section,)})
    failed = made(request, verdict="failed", detail="server 'e' died")
    assert failed.oracle is None
    assert "server 'e' died" in failed.missing["all"]
    tried = Oracle(rows=2, solved=2)
    known = made(request, machine="here").model_copy(update={"oracle": tried})
    assert known.with_sections([section], failed).oracle == tried


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--section", "policy"], "-b"),
        (["--section", "shape", "-b", "http://127.0.0.1:1/v1", "-m", "m"], "-b"),
        (["--section", "shape", "--rows-only"], "--rows-only"),
        (["-r", "2"], "-r"),
        (["-n", "2", "-r", "2"], "-n"),
    ],
)
def test_options_that_do_not_belong_together(
    asked: list[CheckRequest], arguments: list[str], option: str
) -> None:
    done = check("calendar", *arguments)
    assert isinstance(done.exception, ConfigError)
    assert option in str(done.exception)
    assert not asked
