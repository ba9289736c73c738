"""Sockets and directories that belong to another user, as after `su` or `sudo -E`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymgate.core.config import RuntimeConfig
from gymgate.core.errors import SetupError
from gymgate.gym.runtime.ensure import find_runtime, runtimes_dir
from gymgate.stack.client.launch import DaemonAddress, connect_or_start
from gymgate.stack.paths import base_directory

NOBODY = 65534
LISTEN = """
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
listener.listen()
print("listens", flush=True)
connection, _ = listener.accept()
print(len(connection.recv(1000)))
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@pytest.fixture
def others() -> Iterator[Path]:
    """A directory of another user, with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chown(directory, NOBODY, NOBODY)
        yield Path(directory)


@needs_root
def test_no_key_is_sent_to_another_users_daemon(others: Path) -> None:
    path = others / "0123.sock"
    words = [sys.executable, "-I", "-S", "-c", LISTEN, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as listening:
        try:
            assert listening.stdout is not None
            assert listening.stdout.readline() == "listens\n"
            with pytest.raises(SetupError, match=str(NOBODY)):
                connect_or_start(DaemonAddress(path, others / "0123"))
            assert listening.stdout.read() == "0\n"
        finally:
            listening.kill()


@needs_root
def test_another_users_runtime_directory_is_not_used(others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(others))
    assert not base_directory().is_relative_to(others)
    assert not [*others.iterdir()]
    os.chown(others, os.getuid(), os.getgid())
    assert base_directory() == others / "gymgate"


@needs_root
def test_another_users_runtimes_are_not_run(others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As root with the home directory of a user; a cache that is asked for by name may be another user's."""
    monkeypatch.delenv("GYMGATE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(others))
    runtimes = others / "gymgate/runtimes"
    runtimes.mkdir(parents=True)
    assert runtimes_dir() == runtimes
    os.chown(runtimes, NOBODY, NOBODY)
    with pytest.raises(SetupError, match=str(NOBODY)):
        find_runtime(RuntimeConfig())
    monkeypatch.setenv("GYMGATE_CACHE", str(others / "gymgate"))
    assert find_runtime(RuntimeConfig()) is None
