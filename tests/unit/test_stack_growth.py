"""What a long-lived process keeps of what has come and gone: a bounded part."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from gymgate.stack.client import leases as module
from gymgate.stack.client.launch import DaemonAddress
from gymgate.stack.client.leases import Leases
from gymgate.stack.client.stack import Lease


def test_a_daemon_that_was_replaced_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else it would stay a zombie."""
    leases, address = Leases(), DaemonAddress(tmp_path / "s.sock", tmp_path)
    daemons = [Mock(subprocess.Popen) for _ in range(2)]
    for daemon in daemons:
        connected = Mock(socket.socket), daemon
        monkeypatch.setattr(module, "connect_or_start", lambda _, connected=connected: connected)
        assert leases.connect(address)[1] is daemon
    assert leases._replaced == daemons[:1]


async def test_a_process_forgets_the_daemons_that_have_ended() -> None:
    leases = Leases()
    ended, running = subprocess.Popen(["true"]), subprocess.Popen(["cat"], stdin=subprocess.PIPE)  # noqa: ASYNC220
    try:
        ended.wait()
        leases._replaced = [ended, running]
        await leases.close(AsyncMock(Lease, goodbye=AsyncMock(return_value=False)))
        assert leases._replaced == [running]
    finally:
        running.communicate()
