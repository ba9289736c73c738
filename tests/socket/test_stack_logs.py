"""Logs of a stack stay short, however long it runs and whatever its servers write."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from gymgate.stack import logs
from gymgate.stack.daemon import Daemon


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
