"""What dead processes leave where sockets lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gymgate.core.errors import SetupError
from gymgate.gym.runtime.owners import owner, pid_namespace_id
from gymgate.stack.paths import make_private, process_directory, remove_traces


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(prefix="gp-", dir="/tmp") as path:  # short enough for sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path) / "gymgate"


def directory_of(pid: int, base: Path) -> Path:
    path = base / f"p-{pid_namespace_id()}-{pid}-0"
    path.mkdir(parents=True, mode=0o700)
    return path


def test_a_process_that_has_ended_unread_is_dead(base: Path) -> None:
    """A daemon learns of the end of its process before that process's parent does."""
    pid = os.spawnv(os.P_NOWAIT, "/bin/true", ["true"])
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        for remove in (
            lambda path: remove_traces(path / "x.sock", path / "x"),
            lambda _: process_directory(),
        ):
            path = directory_of(pid, base)
            remove(path)
            assert not path.exists()
    finally:
        os.waitpid(pid, 0)


def test_a_directory_of_another_user_is_not_trusted(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made it could replace the sockets in it."""
    base.mkdir(mode=0o700)
    make_private(base)
    monkeypatch.setattr(os, "getuid", lambda: base.stat().st_uid + 1)
    with pytest.raises(PermissionError, match=f"user {base.stat().st_uid}"):
        make_private(base)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link to another user")
def test_a_link_of_another_user_is_not_followed(base: Path, tmp_path: Path) -> None:
    """Where it leads, its owner decides, whomever that place belongs to."""
    base.symlink_to(tmp_path)
    os.lchown(base, 65534, 65534)
    with pytest.raises(PermissionError, match="user 65534"):
        make_private(base)


def test_a_directory_that_others_may_read_is_closed_to_them(base: Path) -> None:
    base.mkdir(mode=0o755)
    make_private(base)
    assert base.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", bytes)
    taken = base / f"p-{owner()}-{bytes(4).hex()}"
    base.mkdir(mode=0o700)
    taken.touch()
    with pytest.raises(SetupError, match=taken.name):
        process_directory()


def test_what_a_living_process_has_stays(base: Path) -> None:
    path = directory_of(os.getpid(), base)
    remove_traces(path / "x.sock", path / "x")
    assert process_directory().parent == base
    assert path.exists()


def test_a_daemon_that_ends_leaves_the_files_of_the_next_one(tmp_path: Path) -> None:
    """It has taken the same place while the first one still stopped."""
    path, logs = tmp_path / "x.sock", tmp_path / "x"
    logs.mkdir()
    path.touch()
    remove_traces(path, logs)
    assert logs.exists()
    path.unlink()
    remove_traces(path, logs)
    assert not logs.exists()
