"""Every user names processes, arguments and sockets as they like, and gymgate reads the kernel's lists of all of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymgate.gym.inside.processes import descendants, stat
from gymgate.gym.runtime import uv
from gymgate.stack.client import daemons
from gymgate.stack.client.daemons import DaemonProcess
from gymgate.stack.client.launch import DaemonCommand

NAMES = (b"\xff\xfe", "日本語".encode()[:8], b") R 1 1 1 1", b"a\nb\\")


@pytest.fixture(params=NAMES)
def named(request: pytest.FixtureRequest) -> Iterator[bytes]:
    """This process has a name that any process may have: of up to 15 bytes, cut anywhere."""
    own = Path(f"/proc/{os.getpid()}/comm")
    before = own.read_bytes()
    own.write_bytes(request.param)
    yield request.param
    own.write_bytes(before.strip())


def test_the_name_of_a_process_may_be_any_bytes(named: bytes) -> None:
    assert int(stat(os.getpid())[1]) == os.getppid()
    assert os.getpid() in descendants(os.getppid())


@pytest.mark.parametrize("number", ["9" * 5000, "٣", "-1", "1 ", ""])
def test_the_arguments_of_a_process_may_be_any(number: str) -> None:
    words = DaemonCommand(3, Path("/x.sock"), Path("/x"), Path("/cache"), 1).words
    assert DaemonCommand.read(words) is not None
    for position in (4, 8):
        assert DaemonCommand.read([*words[:position], number, *words[position + 1 :]]) is None


@pytest.mark.parametrize("listens", [True, False])
def test_the_path_of_a_socket_may_be_any_bytes(listens: bool, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as own, socket.socket(socket.AF_UNIX) as others:
        own.bind(str(tmp_path / "own"))
        if listens:
            own.listen()
        inode = os.fstat(own.fileno()).st_ino
        forged = f"0000: 00000002 00000000 {0 if listens else 0x10000:08X} 0001 01 {inode}x"
        others.bind(b"\0\xff\n\nb\n%b\n" % forged.encode())
        command = DaemonCommand(own.fileno(), tmp_path / "own", tmp_path, tmp_path, 1)
        assert daemons._listens(DaemonProcess(os.getpid(), 0, command)) is listens


def test_no_other_user_can_put_settings_where_uv_looks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv takes `uv.toml` from its directory or the nearest one above, which may say where packages come from."""
    program = tmp_path / "uv"
    program.write_text("#!/bin/sh\npwd -P\necho $PWD\n")
    program.chmod(0o755)
    monkeypatch.setattr(uv, "find_uv", lambda: program)
    for directory in map(Path, uv.run_uv("pip", "list").splitlines()):
        for place in (directory, *directory.parents):
            status = place.stat()
            assert status.st_uid in (0, os.getuid())
            assert not status.st_mode & 0o002, place
