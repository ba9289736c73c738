"""The report of a run that grows: after each step it says what a report of all that is there says, and its stamp tells when."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from test_results_report import RESULT, make_run

from gymgate.core.errors import DataError
from gymgate.results import view
from gymgate.results.growing import GrowingReport
from gymgate.results.page import keyed
from gymgate.results.report import report_parts, title_of
from gymgate.results.report_data import ReportData
from gymgate.results.view import ReportView, VersionedPage
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.stored.record import read_values


def line(key: int, repeat: int, **fields: Any) -> dict[str, Any]:
    value = {"row_key": f"{key:016x}", "occurrence": 0, "repeat": repeat, "seed": None, "task": key}
    value |= {"source": "s", "line": key + 1, "environment": "e", "agent": "a", "status": "completed"}
    value |= {"reward": float((key + repeat) % 3 == 0), "error": None, "result": RESULT, "calls": []}
    return {**value, **fields}


def failure(key: int, repeat: int, *, final: bool, **fields: Any) -> dict[str, Any]:
    error = {"kind": "timeout", "type": "RolloutTimeoutError", "message": f"late {key}"}
    failed = line(key, repeat, status="failed", reward=None, result=None, error=error)
    return {**failed, "final": final, **fields}


def describe(path: Path, rollouts: int, shard: tuple[int, int] = (1, 1)) -> None:
    path.mkdir(parents=True, exist_ok=True)
    extent = {"rollouts": rollouts, "rows": 1, "repeats": 1, "seeds": None, "shard": [*shard]}
    settings = {"policy": {"type": "http", "model": "m"}}
    described = {"format": 1, "settings": settings, "extent": extent, "created": 1_700_000_000}
    (path / "new").write_bytes(orjson.dumps(described))
    (path / "new").replace(path / "run.json")


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def growing_parts(report: GrowingReport) -> tuple[str, list[Any]]:
    """What a growing report says, as JSON; without its progress."""
    title, parts = report.parts()
    return title, [part for part in orjson.loads(orjson.dumps(parts)) if "progress" not in part]


def whole_parts(path: Path) -> tuple[str, list[Any]]:
    """What a report of all that is there says; rollouts of a run under way are not called missing."""
    data = ReportData(50, 4)
    runs = read_runs([path], first_of_overlap=True, see=data.add, see_attempt=data.add_failure)
    parts = orjson.loads(orjson.dumps([*report_parts(runs, data)]))
    return title_of(runs), [
        part for part in parts if not str(part.get("note")).endswith("rollouts are missing")
    ]


@pytest.mark.parametrize("seed", range(5))
def test_at_any_time_it_says_what_a_report_says(tmp_path: Path, seed: int) -> None:
    """Two shards, the second later; lines arrive in pieces; some rollouts fail, of which some finish after all."""
    dice = random.Random(seed)
    shards = [tmp_path / f"shard-{number}-of-2" for number in (1, 2)]
    identities = [(key, repeat) for key in range(6) for repeat in range(5)]
    dice.shuffle(identities)
    pending = [(shards[0] / "rollouts.jsonl", orjson.dumps(line(9, 0)) + b"\n")]
    for number, (key, repeat) in enumerate(identities):
        shard = shards[number >= len(identities) // 2]
        final = dice.random() < 0.2
        if final or dice.random() < 0.2:
            environment = dice.choice(["e", ""])
            failed = orjson.dumps(failure(key, repeat, final=final, environment=environment)) + b"\n"
            pending.append((shard / "failures.jsonl", failed))
        if not final or dice.random() < 0.5:
            pending.append((shard / "rollouts.jsonl", orjson.dumps(line(key, repeat)) + b"\n"))
    pending.append((shards[1] / "rollouts.jsonl", orjson.dumps(line(*identities[0])) + b"\n"))
    report = GrowingReport(tmp_path)
    for path, data in pending:
        if not path.parent.exists():
            describe(path.parent, 15, (int(path.parent.name.split("-")[1]), 2))
        torn = dice.randrange(len(data))
        append(path, data[:torn])
        stamp = report.stamp()
        append(path, data[torn:])
        assert report.stamp() != stamp
        if dice.random() < 0.5:
            assert growing_parts(report) == whole_parts(tmp_path)
    assert growing_parts(report) == whole_parts(tmp_path)


def test_a_page_changes_when_attempts_fail_and_at_no_other_time(tmp_path: Path) -> None:
    """Tasks of a run under way lack rollouts, which it does not say."""
    describe(tmp_path, 4)
    lines = (line(0, 0), line(0, 1), line(1, 0))
    append(tmp_path / "rollouts.jsonl", b"".join(orjson.dumps(each) + b"\n" for each in lines))
    report, stamps = GrowingReport(tmp_path), []
    for more in (b"", b"", orjson.dumps(failure(1, 1, final=False)) + b"\n", b""):
        append(tmp_path / "failures.jsonl", more)
        _, parts = growing_parts(report)
        stamps.append(report.stamp())
        assert "pass@k is shown" not in str(parts)
    first, second, third, fourth = stamps
    assert first == second != third == fourth


def test_it_waits_for_a_run_and_its_first_rollout(tmp_path: Path) -> None:
    path = tmp_path / "run"
    report = GrowingReport(path)
    stamp = report.stamp()
    title, [waiting] = report.parts()
    assert title == str(path)
    assert str(path) in waiting["note"]
    describe(path, 7)
    assert report.stamp() != stamp
    assert report.parts() == (title, [{"progress": {"done": 0, "total": 7}}, waiting])
    append(path / "rollouts.jsonl", orjson.dumps(line(0, 0)) + b"\n")
    assert growing_parts(report) == whole_parts(path)
    (path / "run.json").unlink()
    assert growing_parts(report) == (title, [waiting])


@pytest.mark.parametrize("change", ["extent", "rows", "another run", "shorter"])
def test_another_run_at_the_path_is_read_from_its_start(tmp_path: Path, change: str) -> None:
    describe(tmp_path, 2)
    rollouts = tmp_path / "rollouts.jsonl"
    append(rollouts, b"".join(orjson.dumps(line(0, repeat)) + b"\n" for repeat in range(2)))
    report = GrowingReport(tmp_path)
    stamp = report.stamp()
    growing_parts(report)
    if change == "extent":
        describe(tmp_path, 4)
    elif change == "rows":
        (tmp_path / "rows.txt").write_text("f" * 16)
    elif change == "shorter":
        with rollouts.open("r+b") as file:
            file.truncate(file.readline().__len__())
    else:
        (tmp_path / "new").write_bytes(orjson.dumps(line(3, 3)) + b"\n" + orjson.dumps(line(3, 4)) + b"\n")
        (tmp_path / "new").replace(rollouts)
    assert report.stamp() != stamp
    assert growing_parts(report) == whole_parts(tmp_path)


def test_files_of_rollouts_grow_too(tmp_path: Path) -> None:
    """A run's file of rollouts, and one of NeMo Gym's collector with its failures next to it."""
    path = tmp_path / "rollouts.jsonl"
    report = GrowingReport(path)
    stamp = report.stamp()
    append(path, orjson.dumps(line(0, 0)) + b"\n")
    assert report.stamp() != stamp
    assert growing_parts(report) == whole_parts(path)
    append(path, orjson.dumps(failure(0, 1, final=True)) + b"\n")
    assert growing_parts(report) == whole_parts(path)

    gym = tmp_path / "gym.jsonl"
    named = {"agent_ref": {"name": "a"}, "_ng_task_index": 0}
    append(gym, orjson.dumps({**named, "_ng_rollout_index": 0, "reward": 1.0}) + b"\n")
    report = GrowingReport(gym)
    assert growing_parts(report) == whole_parts(gym)
    for index in (1, 2):
        failed = {**named, "_ng_rollout_index": index, "_ng_failure_class": "timeout"}
        stamp = report.stamp()
        append(tmp_path / "gym_failures.jsonl", orjson.dumps(failed) + b"\n")
        assert report.stamp() != stamp
        assert growing_parts(report) == whole_parts(gym)


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    describe(tmp_path, 2)
    append(tmp_path / "rollouts.jsonl", orjson.dumps(line(0, 0)) + b"\n")
    report = GrowingReport(tmp_path)
    growing_parts(report)
    append(tmp_path / "rollouts.jsonl", b"{torn\n")
    with pytest.raises(DataError) as raised:
        report.parts()
    assert raised.value.line == 2


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert [*read_values(path)] == []
    append(path, b'{"a": 1}\n\n{"a"')
    assert [*read_values(path)] == [(1, {"a": 1})]
    append(path, b": 2}\n")
    assert [*read_values(path)] == [(1, {"a": 1}), (3, {"a": 2})]
    append(path, b'{"a": 3}')
    assert [*read_values(path)] == [(1, {"a": 1}), (3, {"a": 2}), (4, {"a": 3})]
    append(path, b'\n{"a": 4}\n')
    assert [*read_values(path)] == [(1, {"a": 1}), (3, {"a": 2}), (4, {"a": 3}), (5, {"a": 4})]


def test_a_run_that_takes_long_to_read_is_read_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that grows all the time, and takes a second to read, gets a page each 11 s; one without change is only looked at."""
    pauses: list[float | None] = []
    now, readings = 0.0, 0

    class Report(GrowingReport):
        def stamp(self) -> dict[Path, Any]:
            return {self.path: min(len(pauses), 3)}

        def parts(self) -> tuple[str, list[Any]]:
            nonlocal now, readings
            readings, now = readings + 1, now + 1.0
            return "title", []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            if len(pauses) == 6:
                self.set()
            return self.is_set()

    monkeypatch.setattr("gymgate.results.view.time.monotonic", lambda: now)
    loop = asyncio.new_event_loop()
    ReportView(Report(tmp_path))._follow(loop.create_future(), Stop())
    loop.close()
    assert readings == 4
    assert pauses == [10.0, 10.0, 10.0, 10.0, view.POLL_S, view.POLL_S]


def test_a_page_says_what_changed_since_each_version() -> None:
    page = VersionedPage()
    pieces = [("a", b"1"), ("b", b"2")]
    page.update("t", pieces)
    assert orjson.loads(page.since(0)) == {"title": "t", "keys": ["a", "b"], "parts": {"a": 1, "b": 2}}
    first = page.version
    page.update("t", pieces)
    assert page.version == first
    page.update("t", [("a", b"1"), ("b", b"3")])
    page.update("u", [("a", b"1"), ("b", b"3")])
    assert orjson.loads(page.since(first)) == {"title": "u", "parts": {"b": 3}}
    page.update("u", [("c", b"4"), ("b", b"3")])
    assert orjson.loads(page.since(page.version - 1)) == {"title": "u", "keys": ["c", "b"], "parts": {"c": 4}}
    assert orjson.loads(page.since(0))["parts"] == {"b": 3, "c": 4}


def test_a_part_keeps_its_key_while_the_run_grows(tmp_path: Path) -> None:
    """A rollout of another row is a task more, and nothing that was said in other rollouts is another part."""
    make_run(tmp_path / "run")
    report = GrowingReport(tmp_path / "run")
    parts = report.parts()[1]
    before = {key: part for key, part in keyed(parts) if not {"note", "headline"} & {*part}}
    assert len({key for key, _ in keyed(parts)}) == len(parts)
    append(tmp_path / "run" / "rollouts.jsonl", orjson.dumps(line(7, 0)) + b"\n")
    after = dict(keyed(report.parts()[1]))
    assert before.keys() <= after.keys()
    assert all(part == after[key] for key, part in before.items() if "rollout" in part)
    added = [next(iter(part)) for key, part in after.items() if key not in before]
    assert [kind for kind in added if kind not in ("account", "headline", "histogram", "note")] == [
        "task",
        "rollout",
    ]
