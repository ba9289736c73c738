"""`gymgate check` on real servers: packaged environments, and one of our own with faults."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymgate.check import CheckRequest, CheckResult, check_all
from gymgate.errors import ConfigError
from gymgate.stack.forkserver import descendants
from support.checks import PARIS, checked, made_in, recorded
from support.faulty import RECORDED_CONFIG, with_recordings

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
    lines = (PARIS, recorded("of Italy?", "Rome", 0.0))
    check = await checked(with_recordings(tmp_path, *lines), version="0.6.0")
    assert (check.nemo_gym, check.verdict, check.matched, check.compared) == ("0.6.0", "differs", 1, 2)


async def test_recordings_are_compared_line_by_line(tmp_path: Path) -> None:
    """One comes out, one is broken, one differs, one has a row that lacks a field, one was made by an agent that is gone."""
    lines = (
        PARIS,
        "<PLACEHOLDER>",
        recorded("of Italy?", "Rome", 0.0),
        recorded("of Spain?", "Madrid", 1.0),
        recorded("of Italy?", "Rome", 1.0, agent_ref={"type": "responses_api_agents", "name": "retired"}),
    )
    check = await checked(with_recordings(tmp_path, *lines), "writes")
    assert (check.kind, check.environment) == ("config", "faulty")
    assert (check.verdict, check.matched, check.compared, check.rewarded) == ("differs", 2, 4, True)
    assert [row.verdict for row in check.rows] == ["match", "differs", "incomplete", "match"]
    assert [row.packaged for row in check.rows] == [True, True, False, True]
    assert check.evidence == "example_rollouts:3 recorded 0.0, got 1.0"
    assert check.rows[2].cause == "no packaged row was recorded, and the record lacks wanted"
    assert check.notes == ("recorded agent 'retired' no longer exists",)
    assert [broken.split(" ")[0] for broken in check.broken] == ["example_rollouts.jsonl:2"]
    assert made_in(tmp_path)


async def test_one_that_takes_too_much_memory_is_ended(tmp_path: Path) -> None:
    check = await checked(with_recordings(tmp_path, PARIS), "memory", memory_gb=2.0)
    assert (check.verdict, check.detail) == ("blocked", "memory: more than 2 GB")
    assert "the limit is 2 GB" in check.evidence
    assert not check.rewarded


async def test_requirements_that_conflict_block_it(tmp_path: Path) -> None:
    config = with_recordings(tmp_path, PARIS)
    (config.parents[1] / "requirements.txt").write_text("openai==1.3.0\n")
    check = await checked(config)
    assert (check.verdict, check.need) == ("blocked", "conflict"), check
    assert check.detail.count("openai") >= 2, "the requirement, and nemo-gym's own"


async def test_a_value_that_the_config_lacks_blocks_it_until_it_is_given(tmp_path: Path) -> None:
    config = with_recordings(tmp_path, PARIS)
    config.write_text(
        RECORDED_CONFIG.replace("fault: none", "fault: none\n      service_key: ${service_api_key}")
    )
    check = await checked(config)
    assert (check.verdict, check.need, check.detail) == ("blocked", "config", "config: service_api_key")
    given = (("faulty.resources_servers.faulty.fault", "none"), ("service_api_key", "x"))
    (check,) = await check_all([CheckRequest(environment=str(config), version="0.7.0", overrides=given)])
    assert isinstance(check, CheckResult)
    assert check.verdict == "match", check


async def test_an_unknown_environment_is_an_error() -> None:
    (outcome,) = await check_all([CheckRequest(environment="no_such_thing", version="0.7.0")])
    assert isinstance(outcome, ConfigError)


def test_nothing_is_left_of_a_check_that_is_killed(tmp_path: Path) -> None:
    config = with_recordings(tmp_path, PARIS)
    command = [
        sys.executable,
        "-m",
        "gymgate",
        "check",
        str(config),
        "--set",
        "faulty.resources_servers.faulty.fault=hang",
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
