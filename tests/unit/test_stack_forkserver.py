"""A fork server whose daemon is gone before it has begun, and the servers of one that is gone itself."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gymgate.gym.inside import forkserver
from gymgate.stack import forkserver_client
from gymgate.stack.children import Child
from gymgate.stack.forkserver_client import ForkServerClient

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
