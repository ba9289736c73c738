"""A run's directory may be somebody else's: its files are never reached through links, and nothing else is one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gymgate.core.errors import ConfigError, DataError
from gymgate.core.files import filling, open_descriptor, replacing
from gymgate.runs.collected.policies import replay_files
from gymgate.runs.collected.store import LOCK, open_run
from gymgate.runs.counted.aggregate import read_runs
from gymgate.runs.stored.layout import FAILURES, ROLLOUTS, ROWS, RUN

SETTINGS = {"sources": ["rows.jsonl"], "nemo_gym": "0.7.0"}
KEYS = ["0" * 16]
TORN = b"a secret without an end of line"
FILES = (LOCK, RUN, ROWS, ROLLOUTS, FAILURES)


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def hard_link(path: Path, victim: Path) -> None:
    path.hardlink_to(victim)


def loop(path: Path, victim: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path, victim: Path) -> None:
    path.symlink_to(victim.with_name("made-by-the-run"))


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def device(path: Path, victim: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path, victim: Path) -> None:
    path.mkdir()


TRAPS = (link, hard_link, loop, dangling, pipe, device, folder)
Trap = Callable[[Path, Path], None]


def a_run(path: Path) -> Path:
    with open_run(
        path, SETTINGS, {"rollouts": 1, "rows": 1, "repeats": 1, "seeds": None, "shard": [1, 1]}, KEYS
    ):
        pass
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_bytes(TORN)
    return path


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
@pytest.mark.parametrize("name", FILES)
def test_a_run_writes_no_file_outside_its_directory(
    name: str, trap: Trap, resumed: bool, tmp_path: Path, victim: Path
) -> None:
    run = tmp_path / "run"
    if resumed:
        a_run(run)
        (run / name).unlink()
    else:
        run.mkdir()
    trap(run / name, victim)
    # A link in the place of what is written whole is replaced; all else is refused.
    try:
        a_run(run)
    except (ConfigError, DataError) as error:
        assert str(run) in str(error)  # noqa: PT017
    else:
        assert name in (RUN, ROWS)
        assert not (run / name).is_symlink()
    assert victim.read_bytes() == TORN
    assert {path.name for path in tmp_path.iterdir()} == {"run", "victim"}


def test_whoever_exchanges_an_unfinished_file_gains_nothing(tmp_path: Path, victim: Path) -> None:
    """The owner of a directory may put a link in the place of what is written there at any moment."""
    victim.chmod(0o600)
    vault = tmp_path / "vault"
    vault.mkdir(mode=0o700)
    run = tmp_path / "run"
    run.mkdir()
    with replacing(run / "report.html") as file:
        [unfinished] = run.iterdir()
        unfinished.rename(tmp_path / "taken")
        unfinished.symlink_to(victim)
        file.write(b"report")
    with contextlib.suppress(DataError), filling(run / "export"):
        [unfinished] = (path for path in run.iterdir() if path.is_dir())
        unfinished.rmdir()
        unfinished.symlink_to(vault)
    assert [path.stat().st_mode & 0o777 for path in (victim, vault)] == [0o600, 0o700]
    assert victim.read_bytes() == TORN


def test_nothing_is_cut_before_it_is_checked(victim: Path) -> None:
    with pytest.raises(AssertionError):
        open_descriptor(victim, os.O_WRONLY | os.O_TRUNC)
    assert victim.read_bytes() == TORN


@pytest.mark.parametrize("trap", [link, loop, pipe, device], ids=lambda trap: trap.__name__)
def test_a_run_with_other_rows_reads_no_file_outside_its_directory(
    trap: Trap, tmp_path: Path, victim: Path
) -> None:
    run = a_run(tmp_path / "run")
    (run / ROWS).unlink()
    trap(run / ROWS, victim)
    elsewhere = {**SETTINGS, "sources": ["elsewhere/rows.jsonl"]}
    with pytest.raises(DataError, match=ROWS), open_run(run, elsewhere, {}, KEYS):
        pass


@pytest.mark.parametrize("trap", [link, loop, pipe, device], ids=lambda trap: trap.__name__)
@pytest.mark.parametrize("name", [RUN, ROWS, ROLLOUTS, FAILURES])
def test_a_run_reads_no_file_outside_its_directory(
    name: str, trap: Trap, tmp_path: Path, victim: Path
) -> None:
    run = a_run(tmp_path / "run")
    (run / name).unlink()
    trap(run / name, victim)
    with pytest.raises((ConfigError, DataError)) as raised:
        read_runs([run])
    assert TORN.decode() not in str(raised.value)


def test_the_directory_may_be_reached_through_links(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    run = a_run(tmp_path / "runs" / "x")
    a_run(run)
    assert len(read_runs([run]).runs) == 1


def test_a_link_that_the_user_names_is_followed(tmp_path: Path) -> None:
    """Such as the newest of NeMo Gym's files."""
    (tmp_path / "gym.jsonl").write_text("")
    (tmp_path / "newest.jsonl").symlink_to("gym.jsonl")
    [run] = read_runs([tmp_path / "newest.jsonl"]).runs
    assert run.path == tmp_path / "gym.jsonl"


def test_the_way_out_of_a_second_name_is_told(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (tmp_path / "backup").mkdir()
    for path in run.iterdir():
        (tmp_path / "backup" / path.name).hardlink_to(path)
    with pytest.raises(DataError, match="cp -r"):
        a_run(run)
    assert len(read_runs([tmp_path / "backup"]).runs) == 1


def test_a_replayed_run_leads_nowhere_else(tmp_path: Path, victim: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / ROLLOUTS).unlink()
    (run / ROLLOUTS).symlink_to(victim)
    with pytest.raises(ConfigError, match="link"):
        replay_files([str(run)])
