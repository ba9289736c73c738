"""`gymgate check` on real servers: packaged environments, and one of our own with faults."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymgate.core.errors import ConfigError
from gymgate.gym.inside.forkserver import descendants
from gymgate.quality import CheckRequest, CheckResult, check_all
from gymgate.quality.record.storage import load_record
from support.checks import PARIS, checked, made_in, message, recorded
from support.faulty import RECORDED_CONFIG, with_recordings
from support.stacks import SIMPLE

COMMAND = (sys.executable, "-m", "gymgate", "check")
NAME_ERROR = "NameError: name 'txt' is not defined"

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
    """One comes out, one is broken, one differs, one has a row that lacks a field, one was made by an agent that is gone, one
    was judged."""
    judged = {"judge_evaluations": [{"response": {"output": message("It is Paris.")}}]}
    lines = (
        PARIS,
        "<PLACEHOLDER>",
        recorded("of Italy?", "Rome", 0.0),
        recorded("of Spain?", "Madrid", 1.0),
        recorded("of Italy?", "Rome", 1.0, agent_ref={"type": "responses_api_agents", "name": "retired"}),
        recorded("capital of France?", "Lyon", 1.0, **judged),
    )
    check = await checked(with_recordings(tmp_path, *lines), "writes judge")
    assert (check.kind, check.environment) == ("config", "faulty")
    assert (check.verdict, check.matched, check.compared, check.rewarded) == ("differs", 3, 5, True)
    assert [row.verdict for row in check.rows] == ["match", "differs", "incomplete", "match", "match"]
    assert [row.packaged for row in check.rows] == [True, True, False, True, True]
    assert [row.judged_by for row in check.rows][3:] == [None, "recorded"]
    assert check.evidence == "example_rollouts:3 recorded 0.0, got 1.0"
    assert str(check.rows[2].cause).endswith(" wanted")
    (note,) = check.notes
    assert "'retired'" in note
    assert [broken.split(" ")[0] for broken in check.broken] == ["example_rollouts.jsonl:2"]
    assert made_in(tmp_path)


async def test_one_that_takes_too_much_memory_is_ended(tmp_path: Path) -> None:
    check = await checked(with_recordings(tmp_path, PARIS), "memory", memory_gb=2.0)
    assert check.verdict == "blocked"
    assert check.detail.startswith("memory: ")
    assert " 2 GB" in check.detail
    assert " 2 GB" in check.evidence
    assert not check.rewarded


async def test_requirements_that_conflict_block_it_and_an_unknown_name_costs_itself(tmp_path: Path) -> None:
    config = with_recordings(tmp_path, PARIS)
    (config.parents[1] / "requirements.txt").write_text("openai==1.3.0\n")
    names = (str(config), "no_such_thing")
    check, unknown = await check_all([CheckRequest.model_validate({"environments": name}) for name in names])
    assert isinstance(check, CheckResult), check
    assert (check.verdict, check.need) == ("blocked", "conflict"), check
    assert check.detail.count("openai") >= 2, "the requirement, and nemo-gym's own"
    assert isinstance(unknown, ConfigError)


def test_a_check_that_is_killed_leaves_nothing_but_what_it_had_and_goes_on_there(tmp_path: Path) -> None:
    """Of two at once, one hangs; the other one's result is on disk before the command ends."""
    hanging, store = with_recordings(tmp_path), tmp_path / "records"
    record = store / "resources_servers" / f"{SIMPLE}-0.7.0.json"
    hanging.write_text(RECORDED_CONFIG.replace("fault: none", "fault: hang"))
    both = [*COMMAND, str(hanging), SIMPLE, "--jobs", "2", "--record", str(store)]
    with subprocess.Popen(both, stderr=subprocess.DEVNULL) as killed:
        deadline = time.monotonic() + 140  # before the hanging one's own is over
        while not record.exists() and time.monotonic() < deadline:
            assert killed.poll() is None
            time.sleep(0.05)
        family = descendants(killed.pid)
        killed.kill()
    assert family
    deadline = time.monotonic() + 20
    while (left := [pid for pid in family if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    kept = load_record(record)
    assert kept is not None
    assert (kept.environment, kept.verdict) == (SIMPLE, "match")
    again = [*COMMAND, SIMPLE, "--record", str(store)]
    done = subprocess.run(again, capture_output=True, text=True, timeout=60, check=True)
    assert "1 of 1" in done.stderr
    assert load_record(record) == kept


def test_the_author_of_a_server_sees_its_exception_and_its_output(tmp_path: Path) -> None:
    config, logs = with_recordings(tmp_path, PARIS), tmp_path / "logs"
    app = config.parents[1] / "app.py"
    fault = ("--set", "faulty.resources_servers.faulty.fault=name")
    command = [*COMMAND, str(config), *fault, "--logs", str(logs), "-v"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    first, *more = done.stdout.splitlines()
    assert first.startswith("faulty: failed 0/1")
    assert more[0].startswith(f'  File "{app}", line ')
    for text in ("text = txt", NAME_ERROR):
        assert any(text in line for line in more), more
    output = (logs / "faulty" / "faulty.log").read_text()
    assert NAME_ERROR in output
    assert output in done.stderr
    assert {path.suffix for path in (logs / "faulty").iterdir()} == {".log"}


def runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False
