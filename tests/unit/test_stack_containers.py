"""The process that removes a stack's containers."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest

from gymgate.gym.runtime.containers import SERVERS
from gymgate.stack import container_removal


def test_environments_that_start_at_once_share_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would be closed when nobody refers to it, which is its order to remove all containers of the stack."""
    everyone, started = threading.Barrier(4), []

    def popen(command: list[str], **_: object) -> SimpleNamespace:
        with contextlib.suppress(threading.BrokenBarrierError):
            everyone.wait(0.5)
        started.append(command)
        return SimpleNamespace(stdin=None)

    monkeypatch.setattr(container_removal.subprocess, "Popen", popen)
    stack, labels = container_removal.Containers(), []
    threads = [threading.Thread(target=lambda: labels.append(stack.new_labels()[SERVERS])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(started) == 1
    assert len({*labels}) == 4
