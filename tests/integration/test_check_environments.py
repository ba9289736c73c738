"""`gymgate check` on real servers: packaged environments, and one of our own with faults."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymgate.check import CheckRequest, check_all, load_report
from gymgate.errors import ConfigError
from gymgate.stack.forkserver import descendants
from support.checks import CONFIG, PARIS, checked, home_with, made_in, message, recorded

pytestmark = [pytest.mark.gym, pytest.mark.timeout(900)]  # the first use of a release installs it


def stat_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    import os

    def alive() -> set[int]:  # the suite may have adopted orphans, whose ends nobody has read
        found = descendants(os.getpid())
        return {pid for pid in found if (text := stat_of(pid)) and text.rpartition(")")[2].split()[0] != "Z"}

    before = alive()
    yield
    deadline = time.monotonic() + 10  # what was killed with gigabytes in hand takes a moment to be gone
    while (left := alive() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.mark.heavy
async def test_the_older_release_is_checked_alike(tmp_path: Path) -> None:
    check = await checked(home_with(tmp_path, PARIS, recorded("of Italy?", "Rome", 0.0)), version="0.6.0")
    assert (check.version, check.verdict, check.matched, check.compared) == ("0.6.0", "differs", 1, 2)


async def test_a_differing_reward_and_a_broken_line(tmp_path: Path) -> None:
    check = await checked(home_with(tmp_path, PARIS, "<PLACEHOLDER>", recorded("of Italy?", "Rome", 0.0)))
    assert (check.verdict, check.matched, check.compared, check.rewarded) == ("differs", 1, 2, True)
    assert all(row.packaged for row in check.rows)
    assert check.evidence == "example_rollouts:3 recorded 0.0, got 1.0"
    assert check.detail == "cause not known"
    assert [broken.split(" ")[0] for broken in check.broken] == ["example_rollouts.jsonl:2"]


@pytest.mark.parametrize(
    ("fault", "verdict", "detail", "evidence"),
    [
        ("hang", "blocked", "start: not up within 6 s", ""),
        ("memory", "blocked", "memory: more than 2 GB", "GB of memory; the limit is 2 GB"),
        ("host", "blocked", "download: ", "<urlopen error [Errno"),
        ("bug", "failed", "StackStartError: server 'own'", ""),
        ("judge", "blocked", "judge: the record does not hold its answers", ""),
        pytest.param(
            *(
                "binary",
                "blocked",
                "binary: lean4-that-is-not-here",
                "No such file or directory: 'lean4-that",
            ),
            marks=pytest.mark.heavy,
        ),
        pytest.param(
            "gpu", "blocked", "gpu: Found no NVIDIA driver", "RuntimeError", marks=pytest.mark.heavy
        ),
        pytest.param("variable", "blocked", "key: SEARCH_API_KEY", "KeyError", marks=pytest.mark.heavy),
    ],
)
async def test_what_stands_in_the_way_is_named(
    tmp_path: Path, fault: str, verdict: str, detail: str, evidence: str
) -> None:
    timeout = 6.0 if fault == "hang" else 60.0
    check = await checked(home_with(tmp_path, PARIS), fault, start_timeout_s=timeout, memory_gb=2.0)
    assert (check.kind, check.environment) == ("config", "own")
    assert (check.verdict, check.detail[: len(detail)]) == (verdict, detail)
    assert evidence in check.evidence
    assert not check.rewarded
    assert ("ZeroDivisionError: of our own" in check.log_tail) == (fault == "bug")


async def test_a_recorded_judge_judges_again(tmp_path: Path) -> None:
    judged = {"judge_evaluations": [{"response": {"output": message("It is Paris.")}}]}
    check = await checked(home_with(tmp_path, recorded("capital of France?", "Lyon", 1.0, **judged)), "judge")
    assert (check.verdict, check.rows[0].judged_by) == ("match", "recorded")


async def test_a_field_that_neither_row_nor_record_has(tmp_path: Path) -> None:
    check = await checked(home_with(tmp_path, recorded("of Spain?", "Madrid", 1.0)))
    assert (check.verdict, check.rewarded) == ("incomplete", True)
    assert check.detail == "no packaged row was recorded, and the record lacks wanted"


async def test_an_agent_that_is_gone_is_named_and_its_recording_played_by_the_one_there_is(
    tmp_path: Path,
) -> None:
    line = recorded("of Italy?", "Rome", 1.0, agent_ref={"type": "responses_api_agents", "name": "retired"})
    check = await checked(home_with(tmp_path, line), "writes")
    assert (check.verdict, check.matched) == ("match", 1)
    assert check.notes == ("recorded agent 'retired' no longer exists",)
    assert made_in(tmp_path)


async def test_requirements_that_conflict_and_values_that_are_missing_are_named(tmp_path: Path) -> None:
    config = home_with(tmp_path, PARIS)
    (config.parents[1] / "requirements.txt").write_text("openai==1.3.0\n")
    config.write_text(CONFIG.replace("fault: none", "fault: none\n      service_key: ${service_api_key}"))
    check = await checked(config)
    assert check.verdict == "match", check
    conflict, made_up = check.notes
    assert conflict.startswith("without openai==1.3.0: conflict: ")
    assert conflict.count("openai") >= 3, "the requirement, and nemo-gym's own"
    assert made_up == "with a placeholder for service_api_key"


@pytest.mark.heavy
async def test_a_reward_that_differs_with_a_made_up_value_is_blocked_by_that_value(tmp_path: Path) -> None:
    config = home_with(tmp_path, recorded("of Italy?", "Rome", 0.0))
    config.write_text(CONFIG.replace("fault: none", "fault: none\n      service_key: ${service_api_key}"))
    check = await checked(config)
    assert (check.verdict, check.rows[0].verdict) == ("blocked", "differs")
    assert check.detail == "config: a value for service_api_key; a made-up one lets it start"


async def test_rows_without_a_prompt_are_said_to_be_so(tmp_path: Path) -> None:
    config = home_with(tmp_path)
    (config.parents[1] / "data" / "example.jsonl").write_text(
        '{"question": "of France?", "wanted": "Paris"}\n'
    )
    check = await checked(config)
    assert (check.verdict, check.rewarded) == ("incomplete", False)
    assert check.detail.startswith(
        "no data: the rows of example are raw and need a prompt config; `gymgate data"
    )


async def test_rows_without_recordings_still_get_a_reward(tmp_path: Path) -> None:
    check = await checked(home_with(tmp_path))
    assert (check.verdict, check.detail, check.rewarded) == ("incomplete", "no recording", True)


async def test_an_unknown_environment_is_an_error() -> None:
    (outcome,) = await check_all([CheckRequest(environment="no_such_thing", version="0.7.0")])
    assert isinstance(outcome, ConfigError)


def test_nothing_is_left_of_a_check_that_is_killed(tmp_path: Path) -> None:
    config = home_with(tmp_path, PARIS)
    command = [
        sys.executable,
        "-m",
        "gymgate",
        "check",
        str(config),
        "--set",
        "own.resources_servers.own.fault=hang",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as check:
        assert check.stderr is not None
        assert any(line.endswith("checking\n") for line in check.stderr)
        family = descendants(check.pid)
        check.kill()
    deadline = time.monotonic() + 20
    while (left := [pid for pid in family if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert family
    assert not left


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def test_the_command_resumes(tmp_path: Path) -> None:
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    names = ("calendar", "gymnasium")

    def check(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gymgate", "check", *names, "-o", str(results), *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=800, check=True)

    first = check("--jobs", "2", "--page", str(page))
    assert "calendar: match 5/5" in first.stdout
    assert "gymnasium: incomplete (the entrypoint of server 'gymnasium' starts no server" in first.stdout
    assert len([line for line in page.read_text().splitlines() if "| simple_agent |" in line]) == 1
    kept = load_report(results)
    again = check()
    assert "not checked again: 2 of 2" in again.stderr
    assert load_report(results) == kept
