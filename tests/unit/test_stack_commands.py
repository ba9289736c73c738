"""Arguments and tables of `ps`, `logs` and `stop`, with daemons that are not there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gymgate.cli import cli, main
from gymgate.core.config import cache_dir
from gymgate.core.errors import ConfigError, OptionError
from gymgate.stack.client import daemons, ending
from gymgate.stack.client.daemons import DaemonOverview, DaemonProcess, DaemonReport
from gymgate.stack.client.launch import DaemonCommand
from support.json_output import read_output

Show = Callable[..., list[DaemonProcess]]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The daemons that a command ended, and whether at once."""
    found: list[tuple[int, bool]] = []

    def end(chosen: Iterable[DaemonProcess], *, now: bool) -> dict[DaemonProcess, str]:
        endings = dict.fromkeys(chosen, "killed" if now else "stopped")
        found.extend((daemon.pid, now) for daemon in endings)
        return endings

    monkeypatch.setattr(ending, "end_daemons", end)
    return found


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Show:
    """Let commands find daemons with these reports."""

    def show(
        *reports: DaemonReport,
        elsewhere: Sequence[Path] = (),
        of_other_users: int = 0,
        caches: Sequence[Path] = (),
    ) -> list[DaemonProcess]:
        shared = tmp_path / "shared"
        here = {
            DaemonProcess(
                number,
                number,
                DaemonCommand(3, shared / f"{number}.sock", shared / str(number), cache, os.getpid()),
            ): report
            for number, (report, cache) in enumerate(
                itertools.zip_longest(reports, caches, fillvalue=cache_dir().absolute()),
                start=5_000_000,  # beyond the kernel's numbers
            )
        }

        async def ask(asked: Iterable[DaemonProcess]) -> dict[DaemonProcess, DaemonReport]:
            return {daemon: here[daemon] for daemon in asked}

        found = DaemonOverview([*here], elsewhere, of_other_users)
        monkeypatch.setattr(daemons, "find_daemons", lambda: found)
        monkeypatch.setattr(daemons, "ask_daemons", ask)
        return [*here]

    return show


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, [*words])


READY = DaemonReport("ready", 2, [1, 2], 7, {"mcqa": "up", "calendar": "down"})


def test_a_row_says_what_a_stack_does(show: Show) -> None:
    show(READY, DaemonReport("starting", 1, [1], 0, {"mcqa": "starting"}), DaemonReport("not answering"))
    header, first, second, third, *sockets = run("ps").stdout.splitlines()
    assert header.split("  ")[0] == "pid"
    for cell in ("5000000", "ready", "mcqa, calendar (down)", "7", "shared, 2 leases"):
        assert cell in first
    for cell in ("starting", "mcqa ", "0", "shared, 1 lease"):
        assert cell in second
    assert "not answering" in third
    assert ["5000000" in line for line in sockets] == [True, False, False]  # by which others join
    stacks = read_output("ps", run("ps", "--json").stdout)["stacks"]
    assert [each["rollouts"] for each in stacks] == [7, 0, None]
    assert [each["owner"] for each in stacks] == [None] * 3
    assert stacks[0]["environments"][1] == {"name": "calendar", "state": "down"}


def test_a_stack_that_lingers_says_how_long(show: Show) -> None:
    show(DaemonReport("ready", 0, [], 0, {"mcqa": "up"}, ends_in_s=29.6))
    assert "shared, 0 leases, ends in 30 s" in run("ps").stdout


def test_what_cannot_be_looked_at_is_named(show: Show, ended: list[tuple[int, bool]]) -> None:
    show(elsewhere=[Path("/tmp/gymgate-0/p-x-1-y")], of_other_users=3)
    for command in (["ps"], ["stop", "--all"]):
        done = run(*command)
        assert done.exit_code == 0
        assert len(done.stdout.splitlines()) == 1
        path, others = done.stderr.splitlines()
        assert "/tmp/gymgate-0/p-x-1-y" in path
        assert others.endswith("3")
    listing = read_output("ps", run("ps", "--json").stdout)
    assert listing == {"stacks": [], "elsewhere": ["/tmp/gymgate-0/p-x-1-y"], "of_other_users": 3}
    assert ended == []


def test_one_stack_needs_no_choice(show: Show, ended: list[tuple[int, bool]]) -> None:
    [daemon] = show(READY)
    log = daemon.command.directory / "daemon.log"
    log.parent.mkdir(parents=True)
    log.write_text("a\nb\n")

    assert run("logs").stdout == "daemon | a\ndaemon | b\n"
    assert run("logs", "daemon", "-n", "1").stdout == "b\n"
    assert run("stop").stdout == f"stopped {daemon.pid}\n"
    assert run("stop", "--now", str(daemon.pid), str(daemon.pid)).stdout == f"killed {daemon.pid}\n"
    assert ended == [(daemon.pid, False), (daemon.pid, True)]


def test_of_several_one_is_chosen_or_all(show: Show, ended: list[tuple[int, bool]]) -> None:
    first, second = show(READY, READY)
    for command in ("logs", "stop"):
        error = run(command).exception
        assert isinstance(error, ConfigError)
        assert f"{first.pid}, {second.pid}" in str(error)
    assert ended == []
    assert run("stop", str(second.pid)).exit_code == 0
    assert run("stop", "--all").exit_code == 0
    assert [pid for pid, _ in ended] == [second.pid, first.pid, second.pid]


def test_a_stack_of_another_cache_is_taken_by_its_pid_only(
    show: Show, ended: list[tuple[int, bool]], tmp_path: Path
) -> None:
    [other] = show(READY, caches=[tmp_path / "other"])
    for command in ("logs", "stop"):
        error = run(command).exception
        assert isinstance(error, ConfigError)
        for word in (str(other.pid), str(tmp_path / "other"), str(cache_dir())):
            assert word in str(error)
    assert ended == []
    other, own = show(READY, READY, caches=[tmp_path / "other"])
    assert run("stop").exit_code == 0
    assert run("stop", str(other.pid)).exit_code == 0
    assert run("stop", "--all").exit_code == 0
    assert [pid for pid, _ in ended] == [own.pid, other.pid, other.pid, own.pid]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["logs"], ConfigError),
        (["logs", "77"], ConfigError),
        (["stop", "77"], ConfigError),
        (["logs", "mcqa", "daemon"], OptionError),
        (["logs", "77", "daemon", "more"], OptionError),
        (["stop", "--all", "77"], OptionError),
    ],
)
def test_what_is_not_there_is_refused(
    words: list[str], kind: type[Exception], show: Show, ended: list[tuple[int, bool]]
) -> None:
    show()
    assert type(run(*words).exception) is kind
    assert ended == []


@pytest.mark.parametrize(
    "words", [["stop", "mcqa"], ["stop", "0"], ["logs", "-n", "-1"], ["logs", "-n", "all"]]
)
def test_wrong_values_end_with_2(words: list[str], show: Show, ended: list[tuple[int, bool]]) -> None:
    show(READY)
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    assert ended == []


def test_a_stack_that_does_not_end_is_a_failure(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    [daemon] = show(READY)
    monkeypatch.setattr(ending, "end_daemons", lambda chosen, now: {daemon: "still there"})
    done = run("stop")
    assert (done.exit_code, done.stdout) == (1, f"still there {daemon.pid}\n")


def test_a_command_line_is_read_as_it_was_written() -> None:
    command = DaemonCommand(5, Path("/a b/c.sock"), Path("/d"), Path("/c"), 7)
    assert DaemonCommand.read(command.words) == command
    for words in (
        [],
        command.words[1:],
        [*command.words, "x"],
        ["strace", *command.words],
        [*command.words[:-1], "x"],
    ):
        assert DaemonCommand.read(words) is None
