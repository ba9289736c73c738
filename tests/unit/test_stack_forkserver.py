"""A fork server whose daemon is gone before it has begun, and the servers of one that is gone itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gymgate.gym.inside import forkserver
from gymgate.gym.inside.forkserver.forking import ForkServer, is_other_end_closed
from gymgate.gym.inside.processes import (
    SERVER_TAG,
    descendants,
    helpers_of,
    is_tagged,
    proportional_bytes,
    stat,
)
from gymgate.stack.daemon import forkserver_client
from gymgate.stack.daemon.children import Child
from gymgate.stack.daemon.forkserver_client import ForkServerClient

PROGRAM = Path(forkserver.__file__).with_name("__main__.py")


def test_it_ends_without_importing_nemo_gym() -> None:
    """Which takes seconds, and which this interpreter does not have."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        process = subprocess.run(
            [sys.executable, str(PROGRAM), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (process.returncode, process.stderr) == (0, "")


async def test_the_servers_of_a_dead_one_are_killed_outside_the_event_loop_before_they_count_as_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search reads `/proc` for seconds on a busy machine, and others of the stack go on meanwhile."""
    threads = []
    kill = forkserver_client._kill_leftovers

    def kill_leftovers(servers: list[int]) -> None:
        threads.append(threading.current_thread())
        assert not child.exited.done()
        kill(servers)

    monkeypatch.setattr(forkserver_client, "_kill_leftovers", kill_leftovers)
    nothing: Any = None
    client = ForkServerClient(nothing, tmp_path / "log", nothing)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as server:  # noqa: ASYNC220
        child = Child(
            "maths", server.pid, tmp_path / "log", asyncio.get_running_loop().create_future(), client
        )
        client._children[server.pid] = child
        await asyncio.wait_for(client._bury(), 20)
        assert child.exited.result() is None
        assert server.wait(20) is not None
    assert threads
    assert threading.main_thread() not in threads


@contextmanager
def waiting(program: str | Path = sys.executable, **settings: Any) -> Iterator[int]:
    """The pid of a process that waits until this is left."""
    with subprocess.Popen([program, "-c", "input()"], stdin=subprocess.PIPE, **settings) as process:
        try:
            yield process.pid
        finally:
            process.communicate(b"\n")
        assert process.returncode == 0


def test_a_process_is_read_whatever_its_name(tmp_path: Path) -> None:
    (program := tmp_path / "x) S 1 (y").symlink_to(sys.executable)
    with waiting(program) as pid:
        assert stat(pid)[1] == str(os.getpid())


def test_memory_is_counted_in_bytes() -> None:
    assert proportional_bytes([os.getpid()]) > 5_000_000


def test_all_that_a_process_started_is_found() -> None:
    with waiting() as one, waiting() as other:
        assert {one, other} <= {*descendants(os.getpid())}


def test_the_helpers_of_a_server_are_those_with_its_number() -> None:
    """Also in a session of their own, and no other server's whose number begins alike."""
    with waiting(env={**os.environ, SERVER_TAG: "1234567890"}, start_new_session=True) as helper:
        assert helper in helpers_of(1234567890)
        assert helper not in helpers_of(123456789)
        assert is_tagged(helper, 1234567890)


def test_orders_are_taken_whole_and_kill_only_its_own_children() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, waiting() as stranger:
        server = ForkServer(theirs)
        for order in (
            {"op": "kill", "pid": stranger, "signal": signal.SIGKILL, "group": False},
            {"op": "ping"},
        ):
            line = json.dumps(order).encode() + b"\n"
            for piece in (line[:5], line[5:]):
                ours.sendall(piece)
                assert not is_other_end_closed(theirs)
                assert server.receive()
        assert json.loads(ours.recv(1000)) == {"event": "pong"}
        for end in (server.wakeup, server.waker):
            end.close()
