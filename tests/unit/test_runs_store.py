"""A run's directory: torn lines, other runs, other writers, full disks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from gymgate.core.errors import ConfigError, DataError
from gymgate.gateway.dialects import usage_of
from gymgate.gym.row_sources import RowSource
from gymgate.rollouts import ModelCall, Rollout, RolloutError, Usage
from gymgate.rollouts.outcome import LARGEST
from gymgate.rollouts.result import measurement_fields
from gymgate.rollouts.row import make_row
from gymgate.runs.collected.run import _refuse_other_split
from gymgate.runs.collected.store import LOCK, LineLog, differences, open_run
from gymgate.runs.described.pace import (
    DEFAULT_BUDGETS,
    Pace,
    fitting_concurrency,
    may_retry,
    parse_budgets,
    wait_s,
)
from gymgate.runs.described.plan import Identity, RolloutPlan, Shard
from gymgate.runs.stored.attempts import Attempt
from gymgate.runs.stored.layout import read_row_keys, read_run, run_directories
from gymgate.runs.stored.record import CollectedRollout, collected, failure_line, read_values, to_line
from gymgate.runs.stored.score import score_of

SETTINGS = {"policy": {"model": "a", "sampling": {"temperature": 1.0}}, "sources": ["x"]}


def job(number: int = 0) -> Any:
    row = make_row({"responses_create_params": {"input": str(number)}}, "rows.jsonl", number + 1)
    return next(RolloutPlan([RowSource([row], "mcqa")], seeds=(4,)).rollouts())


def rollout(**fields: Any) -> Rollout:
    calls = [ModelCall(index=0, dialect="chat", usage=Usage(output_tokens=3))]
    return Rollout(id="r", environment="mcqa", agent="a", **{"status": "completed", "calls": calls, **fields})


def failed_rollout(kind: Any = "timeout", **fields: Any) -> Rollout:
    error = RolloutError(kind=kind, message="too slow", type="RolloutTimeoutError", **fields)
    return rollout(status="failed", error=error, calls=[])


def test_a_line_gives_the_rollout_back() -> None:
    kept = collected(job(), rollout(reward=0.5, result={"a": [1]}), 2)
    line = to_line(kept)
    assert read(line).identity == job().identity
    assert CollectedRollout.model_validate_json(line) == kept


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_a_line_names_its_rollout_whatever_its_seed(seed: int | None) -> None:
    planned = job()._replace(identity=Identity("0" * 16, 1, 2, seed))
    kept = collected(planned, rollout(), 0)
    assert read(to_line(kept)).identity == planned.identity
    assert abs(kept.finished - time.time()) < 600


def test_whatever_a_result_measures_can_be_read_again() -> None:
    """One rollout's time in nanoseconds made its whole run unreadable."""
    result = {"reward": 1.0, "time_ns": 1.7e18, "large": LARGEST, "reward_parts": {}, "reward_low": -LARGEST}
    fields = measurement_fields(result, b"{}", "key")
    kept = collected(job(), rollout(**fields), 0)
    assert read(to_line(kept)).metrics == {"time_ns": 1.7e18, "large": LARGEST}
    assert read(to_line(kept)).reward_parts == {"reward_low": -LARGEST}


@pytest.mark.parametrize("count", [1 << 32, 1 << 60, 10**30])
def test_whatever_an_endpoint_counts_can_be_read_again(count: int) -> None:
    """A count beyond 53 bits made the whole run unreadable."""
    usage = usage_of({"usage": {"prompt_tokens": count, "completion_tokens": 1}}, "chat")
    calls = [ModelCall(index=0, dialect="chat", usage=usage)] * 1000
    known = count if count <= 1 << 32 else None
    assert read(to_line(collected(job(), rollout(calls=calls), 0))).calls[0].usage.input_tokens == known
    failed = collected(job(), failed_rollout().model_copy(update={"calls": calls}), 0)
    assert (score_of(read(failure_line(failed, final=True))).tokens["policy_model"] is None) == (
        known is None
    )


def test_a_line_of_another_version_is_read_too() -> None:
    value = orjson.loads(to_line(collected(job(), rollout(), 0)))
    assert "segments" not in value
    assert CollectedRollout.model_validate({**value, "segments": []}) == CollectedRollout.model_validate(
        value
    )


def test_an_identity_that_is_not_first_is_found_too() -> None:
    key = "0" * 16
    assert read(b'{"seed": null, "repeat": 1, "row_key": "%s"}' % key.encode()).identity == (key, 0, 1, None)
    with pytest.raises(DataError, match="row_key") as raised:
        read(b'{"repeat": 1}')
    assert (raised.value.path, raised.value.line) == ("r", 1)


def read(line: bytes) -> Attempt:
    return Attempt.read(orjson.loads(line), Path("r"), 1)


@pytest.mark.parametrize("torn", [b'{"row_key":"0', b"\0" * 70_000, b"x" * 200_000])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "rollouts.jsonl"
    whole = to_line(collected(job(), rollout(), 0))
    path.write_bytes(whole + torn)
    log = LineLog(path)
    log.append(whole)
    log.close()
    assert log.repaired == len(torn)
    assert path.read_bytes() == whole + whole


def test_a_run_is_resumed(tmp_path: Path) -> None:
    one, other = job(0), job(1)
    with open_run(tmp_path / "run", SETTINGS, {"repeats": 1}) as run:
        run.rollouts.append(to_line(collected(one, rollout(), 0)))
        run.failures.append(failure_line(collected(one, failed_rollout(), 1), final=False))
        run.failures.append(failure_line(collected(other, failed_rollout(), 1), final=True))
    with open_run(tmp_path / "run", SETTINGS, {"repeats": 2}) as run:
        assert one.identity in run.done
        assert other.identity not in run.done
        assert run.given_up == {other.identity}
        assert run.attempts == {other.identity: {"timeout": 1}}


def test_a_run_keeps_its_beginning_and_its_retries_are_given_back_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = job().identity
    with open_run(tmp_path, SETTINGS, {}) as run:
        run.failures.append(failure_line(collected(job(), failed_rollout(), 1), final=True))
    began = read_run(tmp_path)["created"]
    monkeypatch.setattr("gymgate.runs.collected.store.time.time", lambda: began + 1000)
    for again in (False, True):
        with open_run(tmp_path, SETTINGS, {"rows": int(again)}) as run:
            if again:
                run.retry_failed()
            assert (identity in run, bool(run.attempts)) == (not again, not again)
        assert read_run(tmp_path)["created"] == began


def test_what_is_appended_reaches_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    log = LineLog(tmp_path / "rollouts.jsonl")
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for appended in (False, True, False):
        if appended:
            log.append(b"line\n")
        log.sync()
        assert len(synced) == (appended or len(synced))
    assert len(synced) == 1
    log.close()


def test_what_is_appended_while_the_disk_works_is_synced_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    log = LineLog(tmp_path / "rollouts.jsonl")

    def sync(fd: int) -> None:
        if not synced:
            log.append(b"meanwhile\n")
        synced.append(fd)

    monkeypatch.setattr(os, "fdatasync", sync)
    log.append(b"line\n")
    for _ in range(3):
        log.sync()
    assert len(synced) == 2
    log.close()


def test_a_resume_keeps_what_the_stack_said_and_writes_no_file_anew(tmp_path: Path) -> None:
    """It needs no room on the disk, and the stack that it waits for has not said anything yet."""
    with open_run(tmp_path, {**SETTINGS, "nemo_gym": "0.7.0"}, {}, ["0" * 16]):
        files = [(tmp_path / name).stat().st_ino for name in ("run.json", "rows.txt")]
    with open_run(tmp_path, SETTINGS, {}, ["0" * 16]):
        assert [(tmp_path / name).stat().st_ino for name in ("run.json", "rows.txt")] == files
    assert read_run(tmp_path)["settings"]["nemo_gym"] == "0.7.0"


def test_rows_of_another_file_of_that_name_are_refused(tmp_path: Path) -> None:
    """A file that moved, and one that grew, has rows of the run."""
    with open_run(tmp_path, {**SETTINGS, "sources": ["/a/rows.jsonl"]}, {}, ["0" * 16, "1" * 16]):
        pass
    moved = {**SETTINGS, "sources": ["/b/rows.jsonl"]}
    with pytest.raises(ConfigError, match="other rows"), open_run(tmp_path, moved, {}, ["2" * 16]):
        pass
    with open_run(tmp_path, moved, {}, iter(["1" * 16, "2" * 16])):
        assert read_row_keys(tmp_path) == ["1" * 16, "2" * 16]


def open_below(directory: Path) -> int:
    """How many of this process's open files are in a directory."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(entry.readlink())
    return sum(directory in path.parents for path in found)


def test_a_run_is_named_by_the_process_that_writes_it_and_closed_after_it(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("process 12345678901234567890 on a machine with a long name\n")
    with open_run(tmp_path, SETTINGS, {}):
        assert (tmp_path / LOCK).read_text().split()[:2] == ["process", str(os.getpid())]
        assert (tmp_path / LOCK).read_text().count("\n") == 1
        assert open_below(tmp_path) == 3
    assert open_below(tmp_path) == 0


def test_attempts_of_what_finished_are_forgotten(tmp_path: Path) -> None:
    with open_run(tmp_path, SETTINGS, {}) as run:
        run.add_failure(collected(job(), failed_rollout(), 1), final=False)
        assert run.attempts
        run.add(collected(job(), rollout(), 1))
        assert not run.attempts


def test_shards_are_read_in_order_and_of_one_split(tmp_path: Path) -> None:
    names = [Shard(index, 10).directory for index in (10, 2, 1)]
    for name in (*names, "shard-1-of-10.bak", "shard-2-of-10-old", "shard-x-of-y"):
        (directory := tmp_path / name).mkdir()
        (directory / "run.json").write_text("{}")
    assert [found.name.split("-")[1] for found in run_directories(tmp_path)] == ["1", "2", "10"]
    _refuse_other_split(tmp_path, Shard(3, 10))
    for shard in (Shard(1, 3), Shard(1, 1)):
        with pytest.raises(ConfigError, match="shard"):
            _refuse_other_split(tmp_path, shard)
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "run.json").write_text("{}")
    _refuse_other_split(tmp_path / "whole", Shard(1, 1))
    with pytest.raises(ConfigError, match="not split"):
        _refuse_other_split(tmp_path / "whole", Shard(1, 2))


def test_a_shards_directory_is_no_link(tmp_path: Path) -> None:
    """Whoever shares the directory could have a run overwrite files of another one."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "shard-1-of-2").symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="link"):
        _refuse_other_split(tmp_path, Shard(1, 2))
    _refuse_other_split(tmp_path, Shard(2, 2))


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    with open_run(tmp_path, SETTINGS, {}):
        pass
    changed = {"policy": {"model": "b", "sampling": {"temperature": 1.0}}, "sources": ["x"]}
    with (
        pytest.raises(ConfigError, match=r"policy\.model: 'a' there, 'b' here") as caught,
        open_run(tmp_path, changed, {}),
    ):
        pass
    assert "temperature" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_integers_of_any_length_are_settings(tmp_path: Path) -> None:
    with open_run(tmp_path, {"overrides": {"seed": 2**70}}, {}):
        pass
    with open_run(tmp_path, {"overrides": {"seed": 2**70}}, {}):
        assert read_run(tmp_path)["settings"]["overrides"]["seed"] == 2**70
    with (
        pytest.raises(ConfigError, match=str(2**70 + 1)),
        open_run(tmp_path, {"overrides": {"seed": 2**70 + 1}}, {}),
    ):
        pass


def test_differences_name_what_is_missing() -> None:
    (missing,) = differences({"a": {"b": 1}}, {"a": {}})
    assert missing.startswith("a.b: 1 ")
    assert differences({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 3, "c": 2}]}) == ["a.0.b: 1 there, 3 here"]


def test_a_run_of_another_form_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path, SETTINGS, {}):
        pass
    described = orjson.loads((tmp_path / "run.json").read_bytes())
    for other in ({**described, "format": described["format"] + 1}, {"format": 1}, [described]):
        (tmp_path / "run.json").write_bytes(orjson.dumps(other))
        for refused in (lambda: read_run(tmp_path), lambda: open_run(tmp_path, SETTINGS, {}).__enter__()):
            with pytest.raises(DataError) as caught:
                refused()
            assert caught.value.path == str(tmp_path / "run.json")
            assert "\n" not in str(caught.value)


def test_somebody_elses_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"rollouts\.jsonl"), open_run(tmp_path, SETTINGS, {}):
        pass
    assert (tmp_path / "rollouts.jsonl").read_text() == "{}\n"


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with open_run(tmp_path, SETTINGS, {}):
        pass
    good = to_line(collected(job(), rollout(), 0))
    (tmp_path / "rollouts.jsonl").write_bytes(good + b"{broken}\n" + good)
    with pytest.raises(DataError, match=r"rollouts\.jsonl:2: not JSON"), open_run(tmp_path, SETTINGS, {}):
        pass


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gymgate.runs.collected.store import open_run\n"
        f"with open_run(Path({str(tmp_path)!r}), {SETTINGS!r}, {{}}): print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "open\n"
        with (
            pytest.raises(ConfigError, match=rf"\b{other.pid}\b"),
            open_run(tmp_path, SETTINGS, {}),
        ):
            pass
        other.stdin.close()
        assert other.wait(30) == 0
    with open_run(tmp_path, SETTINGS, {}):
        pass


def test_a_file_system_without_locks_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Lustre without its `flock` option; no file system of Linux's own lacks it, so the call fails here."""

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(DataError, match="Function not implemented") as caught,
        open_run(tmp_path, SETTINGS, {}),
    ):
        pass
    assert str(tmp_path) in str(caught.value)
    assert "being written" not in str(caught.value)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A disk with room for so much: the kernel writes what fits and then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "rollouts.jsonl")
    log.append(b"x" * 99 + b"\n")
    with largest_file(150):
        with pytest.raises(DataError, match=r"\b50 of 100\b"):
            log.append(b"y" * 99 + b"\n")
        log.append(b"z" * 49 + b"\n")
        with pytest.raises(DataError, match=r"rollouts\.jsonl"):
            log.append(b"y" * 99 + b"\n")
    log.append(b"w\n")
    log.close()
    assert (tmp_path / "rollouts.jsonl").read_bytes() == b"x" * 99 + b"\n" + b"z" * 49 + b"\n" + b"w\n"


def test_a_torn_line_stays_cut_off_when_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b"x" * 99 + b"\n" + b"torn")
    log = LineLog(path)
    with largest_file(150), pytest.raises(DataError, match=r"\b50 of 100\b"):
        log.append(b"y" * 99 + b"\n")
    log.close()
    assert path.read_bytes() == b"x" * 99 + b"\n"


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DataError, match=r"file/run: Not a directory"),
        open_run(tmp_path / "file" / "run", SETTINGS, {}),
    ):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DataError, match="Permission denied"), open_run(tmp_path, SETTINGS, {}):
        pass


def test_reading_leaves_a_torn_line_out(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(b'{"a": 1}\n\n{"a": NaN}\n{"a"')
    values = [value["a"] for _, value in read_values(path)]
    assert values[0] == 1
    assert len(values) == 2


@pytest.mark.parametrize(
    ("kind", "retryable", "failures", "again"),
    [
        ("infrastructure", True, 3, True),
        ("infrastructure", True, 4, False),
        ("timeout", True, 1, True),
        ("timeout", True, 2, False),
        ("policy", True, 1, True),
        ("policy", False, 1, False),
        ("data", False, 1, False),
        ("environment", False, 1, True),
    ],
)
def test_budgets(kind: Any, retryable: bool, failures: int, again: bool) -> None:
    error = RolloutError(kind=kind, message="", type="", retryable=retryable)
    failed = Rollout(id="r", environment="e", agent="a", status="failed", error=error)
    assert may_retry(failed, {kind: failures}, DEFAULT_BUDGETS) is again


def test_budgets_of_the_command_line() -> None:
    assert parse_budgets(["2", "timeout=5"]) == {
        "infrastructure": 2,
        "policy": 2,
        "environment": 2,
        "timeout": 5,
    }
    for wrong in ("x=1", "timeout", "timeout=", "=2", "timeout=-1"):
        with pytest.raises(ConfigError, match="--retries"):
            parse_budgets([wrong])
    assert 0.5 <= wait_s(1) <= 1
    assert 15 <= wait_s(40) <= 30


def test_failures_that_end_a_run_grow_with_its_concurrency() -> None:
    ends = [Pace(1), Pace(100), Pace(100, failures_in_a_row=3), Pace(100, failures_in_a_row=0)]
    assert [pace.most_failures_in_a_row for pace in ends] == [50, 200, 3, 0]


def test_concurrency_fits_what_the_stack_runs_at_once() -> None:
    assert fitting_concurrency(64, 64) == (64, None)
    fitting, message = fitting_concurrency(1000, 64)
    assert fitting == 64
    assert message is not None
    assert "from 1000 to 64" in message
