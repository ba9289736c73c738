"""Daemons seen and ended from outside: real processes, whose stack has not been started."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gymgate.core.errors import ConfigError
from gymgate.stack import logs
from gymgate.stack.client import daemons, ending
from gymgate.stack.client.daemons import (
    DaemonOverview,
    DaemonProcess,
    DaemonReport,
    find_daemons,
    read_daemon,
)
from gymgate.stack.client.ending import end_daemons
from support.daemons import Waiting, runtime_directory, waiting
from support.json_output import read_output
from support.namespaces import elsewhere, lives_elsewhere
from support.stacks import alive
from support.terminal import terminal

COMMAND = [sys.executable, "-m", "gymgate"]
STARTS = """
import os, sys
from support.daemons import *
path = (shared_directory() if sys.argv[1:] else process_directory()) / "0123456789abcdef.sock"
connection, process = connect_or_start(DaemonAddress(path, path.with_suffix("")))
print(path, flush=True)
"""


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime_directory(monkeypatch) as path:
        yield path


@pytest.fixture
def one() -> Iterator[Waiting]:
    with waiting() as found:
        yield found


def asked(daemon: DaemonProcess) -> DaemonReport:
    return asyncio.run(daemons.ask_daemons([daemon]))[daemon]


def gymgate(*words: str) -> subprocess.CompletedProcess[str]:
    """A command that ends, and what it prints."""
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, check=False)


def test_a_daemon_is_found_by_its_process(one: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the variables say about where its files are."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert one.daemon in find_daemons().reachable
    assert one.daemon.owner == os.getpid()
    assert one.daemon.owner_command is not None
    assert Path(one.daemon.owner_command[0]).name.startswith("python")
    assert (one.daemon.memory or 0) > 1_000_000
    report = asked(one.daemon)
    assert (report.state, report.leases, report.processes) == ("starting", 1, [os.getpid()])


def test_a_newer_daemon_may_report_more(one: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    call = daemons.Peer.call

    async def newer(peer: Any, method: str, **parameters: Any) -> Any:
        return {**await call(peer, method, **parameters), "mood": "good"}

    monkeypatch.setattr(daemons.Peer, "call", newer)
    assert asked(one.daemon).leases == 1


def test_a_shared_daemon_belongs_to_nobody() -> None:
    with waiting(shared=True) as shared:
        assert (shared.daemon.owner, shared.daemon.owner_command) == (None, None)


def test_a_daemon_that_hangs_is_not_waited_for(one: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one whose queue of connections is full, so that even connecting would wait."""
    monkeypatch.setattr(daemons, "ANSWER_S", 0.2)
    os.kill(one.daemon.pid, signal.SIGSTOP)
    assert asked(one.daemon).state == "not answering"
    with contextlib.ExitStack() as exits:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock = exits.enter_context(socket.socket(socket.AF_UNIX))
                sock.setblocking(False)
                sock.connect(str(one.daemon.command.socket_path))
        assert asked(one.daemon).state == "not answering"
    os.kill(one.daemon.pid, signal.SIGCONT)


def test_a_daemon_whose_socket_was_removed_is_there(one: Waiting) -> None:
    """By a cleaner of temporary files, or because another daemon took its name."""
    path = one.daemon.command.socket_path
    path.unlink()
    shutil.rmtree(one.daemon.command.directory)
    assert one.daemon in find_daemons().reachable
    assert asked(one.daemon).state == "not answering"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        assert asked(one.daemon).state == "starting"  # who listens is the process that started it
    assert end_daemons([one.daemon], now=False) == {one.daemon: "stopped"}


def test_a_process_that_only_looks_like_a_daemon_is_none(one: Waiting, tmp_path: Path) -> None:
    """It has the command line of one, but does not write to the log of its directory."""
    module = tmp_path / "gymgate" / "stack" / "daemon.py"
    module.parent.mkdir(parents=True)
    module.write_text("print('ready', flush=True); input()")
    for package in (module.parent, module.parent.parent):
        (package / "__init__.py").touch()
    command = one.daemon.command
    with subprocess.Popen(
        command.words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert read_daemon(process.pid) is None
        assert [found.pid for found in find_daemons().reachable if found.command == command] == [
            one.daemon.pid
        ]


def test_a_daemon_of_another_user_is_only_counted(one: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    before = find_daemons().of_other_users
    someone = os.getuid() + 1
    monkeypatch.setattr(daemons, "unjudged_stacks", set)
    monkeypatch.setattr(daemons, "_unreachable_sockets", lambda here: [])
    monkeypatch.setattr(os, "getuid", lambda: someone)
    found = find_daemons()
    assert one.daemon not in found.reachable
    assert found.of_other_users > before


@pytest.mark.parametrize("shared", [False, True])
def test_stacks_in_another_namespace_are_named(shared: bool) -> None:
    """Seen from inside one, where processes of outside have no numbers."""
    program = "from gymgate.stack.client.daemons import find_daemons; found = find_daemons()\n"
    program += "print(*found.unreachable, len(found.reachable), sep='\\n')"
    with waiting(shared=shared) as outside:
        *paths, here = elsewhere(program).split()
        assert here == "0"
        path = outside.daemon.command.socket_path
        assert str(path if shared else path.parent) in paths
        assert asked(outside.daemon).leases == 1


def test_stacks_of_a_namespace_are_not_touched_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(tests))
    with lives_elsewhere(STARTS) as line:
        path = Path(line.strip())
        found = find_daemons()
        assert path.parent in found.unreachable
        assert all(daemon.command.socket_path != path for daemon in found.reachable)


def test_a_daemon_is_told_to_stop_and_leaves_nothing(one: Waiting) -> None:
    assert end_daemons([one.daemon], now=False) == {one.daemon: "stopped"}
    assert one.closes()
    assert one.process.wait(10) == 0
    assert not one.daemon.command.socket_path.exists()
    assert not one.daemon.command.directory.exists()
    assert one.daemon not in find_daemons().reachable


@pytest.mark.parametrize("now", [False, True])
def test_a_daemon_that_hangs_is_killed_and_leaves_nothing(
    one: Waiting, now: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "STOP_S", 0.2)
    os.kill(one.daemon.pid, signal.SIGSTOP)
    assert end_daemons([one.daemon], now=now) == {one.daemon: "killed"}
    assert one.process.wait(10) == -signal.SIGKILL
    assert not one.daemon.command.socket_path.exists()
    assert not one.daemon.command.directory.exists()


def test_another_process_with_the_number_of_a_daemon_is_not_touched(one: Waiting) -> None:
    """Nor are the files of the daemon that has taken the earlier one's place."""
    earlier = dataclasses.replace(one.daemon, ticks=one.daemon.ticks - 1)
    for now in (False, True):
        assert end_daemons([earlier], now=now) == {earlier: "stopped"}
    assert alive([one.daemon.pid])
    assert asked(one.daemon).state == "starting"
    with pytest.raises(ConfigError, match="4194304"):
        DaemonOverview([one.daemon], [], 0).choose(4194304)


def test_the_table_fits_a_terminal(one: Waiting) -> None:
    """Other stacks of this machine may be in it."""
    names = one.daemon.command.directory / "logs" / "an_environment_with_a_long_name_that_is_wrapped"
    names.mkdir(parents=True)
    os.kill(one.daemon.pid, signal.SIGSTOP)
    for width in (80, 120):
        lines = terminal(width, "ps")
        assert max(map(len, lines)) <= width
        assert lines[0].split()[:3] == ["pid", "state", "environments"]
        row = next(line for line in lines if line.startswith(f"{one.daemon.pid} "))
        assert row.split()[1:3] == ["not", "answering"]


def test_the_table_and_its_json_show_a_daemon(one: Waiting) -> None:
    done = gymgate("ps")
    assert done.returncode == 0
    [row] = [line for line in done.stdout.splitlines() if line.startswith(f"{one.daemon.pid} ")]
    assert row.split()[1:4] == ["starting", "-", "0"]
    assert f"{os.getpid()} python" in row
    stacks = read_output("ps", gymgate("ps", "--json").stdout)["stacks"]
    [stack] = [each for each in stacks if each["pid"] == one.daemon.pid]
    assert (stack["share"], stack["owner"], stack["leases"]) == ("process", os.getpid(), 1)
    assert stack["processes"] == [os.getpid()]
    assert stack["socket"] == str(one.daemon.command.socket_path)


def test_the_socket_of_a_shared_stack_is_printed() -> None:
    """On a line of its own, in which a path is not wrapped."""
    with waiting(shared=True) as shared:
        lines = terminal(80, "ps")
    path = shared.daemon.command.socket_path
    assert f"socket of {shared.daemon.pid}: {path}" in map(str.strip, lines)


@pytest.fixture
def logged(one: Waiting) -> dict[str, Path]:
    """Logs of two servers and the daemon's."""
    directory = one.daemon.command.directory
    paths = {name: directory / "logs" / "mcqa" / f"{name}.log" for name in ("mcqa", "mcqa_agent")}
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"first of {name}\nlast of {name}\n")
    (directory / "daemon.log").write_text("no end")
    return paths | {"daemon": directory / "daemon.log"}


def test_logs_are_printed(one: Waiting, logged: dict[str, Path]) -> None:
    pid = str(one.daemon.pid)
    assert gymgate("logs", pid).stdout.splitlines() == [
        "daemon | no end",
        *(f"{name} | {which} of {name}" for name in ("mcqa", "mcqa_agent") for which in ("first", "last")),
    ]
    assert gymgate("logs", pid, "mcqa").stdout == "first of mcqa\nlast of mcqa\n"
    assert gymgate("logs", pid, "mcqa", "-n", "1").stdout == "last of mcqa\n"
    assert gymgate("logs", pid, "daemon", "-n", "1").stdout == "no end\n"
    assert gymgate("logs", pid, "-n", "0").stdout == ""
    wrong = gymgate("logs", pid, "mcqaa")
    assert (wrong.returncode, wrong.stdout, len(wrong.stderr.splitlines())) == (1, "", 1)
    assert "'mcqaa'" in wrong.stderr
    assert "daemon, mcqa, mcqa_agent" in wrong.stderr


class Following:
    """A command that follows logs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        assert process.stdout is not None
        self.stdout = process.stdout
        self._read = b""

    def line(self) -> str:
        """The next line that it prints."""
        while b"\n" not in self._read:
            ready, _, _ = select.select([self.stdout], [], [], 30)
            assert ready, "nothing is printed"
            part = os.read(self.stdout.fileno(), 1 << 20)
            assert part, "it has ended"
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def rest(self) -> tuple[str, str]:
        """What it prints until it ends, and its errors."""
        out, errors = self.process.communicate(timeout=30)
        return (self._read + out).decode(), errors.decode()


@contextmanager
def following(*words: str) -> Iterator[Following]:
    command = [*COMMAND, "logs", "-f", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield Following(process)
        finally:
            process.kill()


def test_logs_are_followed_until_the_stack_ends(one: Waiting, logged: dict[str, Path]) -> None:
    """Past a cut, into a new log, and to the last line."""
    with following(str(one.daemon.pid), "-n", "1") as command:
        for name in ("mcqa", "mcqa_agent"):
            assert command.line() == f"{name} | last of {name}"
        with logged["mcqa"].open("a") as writer:
            writer.write("x" * logs.MAX_LOG + "\nbefore the cut\n")
        assert command.line().startswith("mcqa | xxx")
        assert command.line() == "mcqa | before the cut"
        logs.cut_logs(one.daemon.command.directory)
        with logged["mcqa"].open("a") as writer:
            writer.write("after the cut\n")
        assert command.line() == "mcqa | after the cut"
        logged["mcqa"].with_name("restarted.log").write_text("new\nand its ")
        assert command.line() == "restarted | new"
        same = logged["mcqa"].parents[1] / "calendar" / "mcqa.log"
        same.parent.mkdir()
        same.write_text("of another environment\n")
        assert command.line() == "calendar/mcqa | of another environment"
        assert end_daemons([one.daemon], now=False) == {one.daemon: "stopped"}
        rest, errors = command.rest()
        assert (command.process.returncode, errors) == (0, "")
        assert "daemon | no end" in rest
        assert "restarted | and its \n" in rest


def test_a_log_that_is_replaced_is_followed(one: Waiting, logged: dict[str, Path]) -> None:
    """As by a server that was restarted after a cleaner had removed it."""
    with following(str(one.daemon.pid), "mcqa", "-n", "1") as command:
        assert command.line() == "last of mcqa"
        with logged["mcqa"].open("a") as writer:
            writer.write("to the old file")
        logged["mcqa"].with_name("new").write_text("to the new file\n")
        logged["mcqa"].with_name("new").replace(logged["mcqa"])
        assert [command.line(), command.line()] == ["to the old file", "to the new file"]


def test_following_ends_with_ctrl_c(one: Waiting, logged: dict[str, Path]) -> None:
    with following(str(one.daemon.pid), "mcqa") as command:
        assert command.line() == "first of mcqa"
        command.process.send_signal(signal.SIGINT)
        command.rest()
        assert command.process.returncode == 130


def test_a_reader_that_has_enough_ends_the_command(one: Waiting, logged: dict[str, Path]) -> None:
    logged["mcqa"].write_bytes(b"line\n" * 500_000)
    with following(str(one.daemon.pid), "mcqa") as command:
        assert command.line() == "line"
        command.stdout.close()
        assert command.process.wait(30) == 1
        assert command.process.stderr is not None
        assert command.process.stderr.read() == b""


def test_the_command_stops_one(one: Waiting) -> None:
    with waiting(name="fedcba9876543210") as other:
        done = gymgate("stop", str(one.daemon.pid))
        assert (done.returncode, done.stdout) == (0, f"stopped {one.daemon.pid}\n")
        assert str(os.getpid()) in done.stderr  # which still runs
        assert one.closes()
        assert alive([other.daemon.pid])
        done = gymgate("stop", "--now", str(other.daemon.pid))
        assert (done.returncode, done.stdout) == (0, f"killed {other.daemon.pid}\n")
    again = gymgate("stop", str(one.daemon.pid))
    assert (again.returncode, again.stdout, len(again.stderr.splitlines())) == (1, "", 1)
