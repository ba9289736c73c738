"""Daemons that run, as processes of their own, without a stack: they wait for the first lease to say hello."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gymgate.stack.client.daemons import DaemonProcess, ask_daemons, read_daemon
from gymgate.stack.client.launch import DaemonAddress, connect_or_start
from gymgate.stack.paths import process_directory, shared_directory

START_S = 30.0


@dataclass(frozen=True)
class Waiting:
    """A daemon, its process, and the connection that keeps it."""

    daemon: DaemonProcess
    process: subprocess.Popen[bytes]
    connection: socket.socket

    def closes(self) -> bool:
        """Whether the daemon ends the connection."""
        self.connection.settimeout(START_S)
        with contextlib.suppress(ConnectionError):
            while self.connection.recv(4096):
                pass
        return True


@contextmanager
def runtime_directory(patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for the sockets of this test's daemons."""
    with TemporaryDirectory(prefix="gd-", dir="/tmp") as path:  # short enough for sockets
        patch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path) / "gymgate"


@contextmanager
def waiting(*, shared: bool = False, name: str = "0123456789abcdef") -> Iterator[Waiting]:
    """A daemon that answers. It has ended when the context is left."""
    path = (shared_directory() if shared else process_directory()) / f"{name}.sock"
    connection, process = connect_or_start(DaemonAddress(path, path.with_suffix("")))
    assert process is not None
    with connection, process:
        try:
            deadline = time.monotonic() + START_S
            while (daemon := _answering(process.pid)) is None:
                assert time.monotonic() < deadline, "the daemon does not answer"
                time.sleep(0.02)
            yield Waiting(daemon, process, connection)
        finally:
            process.kill()


def _answering(pid: int) -> DaemonProcess | None:
    daemon = read_daemon(pid)
    if daemon is None or asyncio.run(ask_daemons([daemon]))[daemon].leases is None:
        return None
    return daemon
