"""Logs of a stack stay short, however long it runs and whatever its servers write."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from gymgate.stack import logs
from gymgate.stack.daemon.process import Daemon


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_LOG", 10_000)
    monkeypatch.setattr(logs, "KEPT", 1_000)
    monkeypatch.setattr(logs, "CHECK_S", 0.01)


def lines(first: int, after: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(first, after))


def test_the_end_stays_and_its_writer_goes_on_behind_it(tmp_path: Path, short: None) -> None:
    log = tmp_path / "logs" / "mcqa" / "server.log"
    log.parent.mkdir(parents=True)
    log.touch()
    fd = os.open(log, os.O_WRONLY | os.O_APPEND)  # as servers have it
    try:
        os.write(fd, lines(0, 5_000))
        before = log.stat().st_size
        logs.cut_logs(tmp_path)
        os.write(fd, lines(5_000, 5_003))
    finally:
        os.close(fd)
    text = log.read_bytes()
    assert len(text) < 1_200
    dropped, _, kept = text.partition(b"\n")
    assert kept.startswith(b"line 4")
    assert kept.endswith(lines(4_990, 5_003))
    assert dropped == b"[%d bytes were dropped here]" % (before + len(lines(5_000, 5_003)) - len(kept))


def test_what_is_written_while_a_log_is_cut_stays_in_its_order(tmp_path: Path, short: None) -> None:
    """A line comes after each look at the file's content, as long as the cut goes on."""
    log = tmp_path / "server.log"
    log.write_bytes(lines(0, 5_000))
    late = iter(range(5_000, 5_002))
    with log.open("ab", buffering=0) as writer:

        def write_after_reading(frame: Any, event: str, arg: Any) -> None:
            is_read = event == "c_return" and getattr(arg, "__name__", "") == "read"
            if is_read and (number := next(late, None)) is not None:
                writer.write(lines(number, number + 1))

        sys.setprofile(write_after_reading)
        try:
            logs.cut_logs(tmp_path)
        finally:
            sys.setprofile(None)
        writer.write(lines(5_002, 5_003))
    dropped, _, kept = log.read_bytes().partition(b"\n")
    assert kept == lines(0, 5_003)[-len(kept) :]
    assert kept.endswith(lines(4_990, 5_003))
    assert dropped == b"[%d bytes were dropped here]" % (len(lines(0, 5_003)) - len(kept))


def test_short_logs_and_other_files_are_left_alone(tmp_path: Path, short: None) -> None:
    for name, size in (("daemon.log", 10_000), ("rows.jsonl", 20_000)):
        (tmp_path / name).write_bytes(b"x" * size)
    logs.cut_logs(tmp_path)
    assert [(tmp_path / name).stat().st_size for name in ("daemon.log", "rows.jsonl")] == [10_000, 20_000]


async def test_a_daemon_sees_to_it(tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that is gone does not keep it from the others."""
    loop, cut, cut_logs = asyncio.get_running_loop(), asyncio.Event(), logs.cut_logs

    def cutting(directory: Path) -> None:
        cut_logs(directory)
        loop.call_soon_threadsafe(cut.set)

    monkeypatch.setattr(logs, "cut_logs", cutting)
    log = tmp_path / "daemon.log"
    log.write_bytes(b"x\n" * 10_000)
    (tmp_path / "a.log").symlink_to("nowhere")
    before = signal.getsignal(signal.SIGINT)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        daemon = Daemon(listener, tmp_path / "s", tmp_path, os.getppid())
        serving = asyncio.create_task(daemon.serve())
        try:
            await asyncio.wait_for(cut.wait(), 20)
            assert log.stat().st_size < 1_200
        finally:
            signal.signal(signal.SIGINT, before)
            daemon.retire()
            await serving


def test_who_reads_gets_each_line_once_whatever_is_cut(tmp_path: Path, short: None) -> None:
    """Also lines that are half written when the log is cut, and those between two cuts."""
    log = tmp_path / "daemon.log"
    log.touch()
    reader, found, chance = logs.LogReader(log), list[bytes](), random.Random(1)
    everything = lines(0, 20_000)
    with log.open("ab", buffering=0) as writer:
        at = 0
        while at < len(everything):
            size = chance.randrange(1, 3_000)
            writer.write(everything[at : at + size])
            at += size
            found += reader.lines()
            if chance.random() < 0.3:
                logs.cut_logs(tmp_path)
    assert log.stat().st_size < len(everything) // 2
    assert found == everything.splitlines()
    assert reader.rest() == []
    reader.close()


def test_who_reads_too_late_learns_what_is_missing(tmp_path: Path, short: None) -> None:
    log = tmp_path / "daemon.log"
    log.write_bytes(b"first\nhalf a li")
    reader = logs.LogReader(log)
    assert reader.lines() == [b"first"]
    with log.open("ab") as writer:
        writer.write(b"ne\n" + lines(0, 5_000))
    logs.cut_logs(tmp_path)
    half, dropped, *kept = reader.lines()
    assert half == b"half a li"
    assert dropped.startswith(b"[")
    assert dropped.endswith(b" bytes were dropped here]")
    assert kept == lines(0, 5_000).splitlines()[-len(kept) :]
    reader.close()


def test_a_log_that_is_emptied_or_replaced_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    log.write_bytes(b"old\n")
    reader = logs.LogReader(log)
    assert reader.lines() == [b"old"]
    os.truncate(log, 0)
    assert reader.lines() == []
    with log.open("ab") as writer:
        writer.write(b"new\nlast")
    assert reader.lines() == [b"new"]
    assert reader.is_of(log)
    log.unlink()
    assert not reader.is_of(log)
    log.touch()
    assert not reader.is_of(log)
    assert reader.rest() == [b"last"]
    reader.close()


def test_logs_have_the_names_of_servers(tmp_path: Path) -> None:
    for name in ("daemon", "logs/mcqa/config", "logs/calendar/config", "logs/mcqa/mcqa_agent"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.log").touch()
    assert logs.named_logs(tmp_path) == {
        "daemon": tmp_path / "daemon.log",
        "calendar/config": tmp_path / "logs/calendar/config.log",
        "mcqa/config": tmp_path / "logs/mcqa/config.log",
        "mcqa_agent": tmp_path / "logs/mcqa/mcqa_agent.log",
    }
