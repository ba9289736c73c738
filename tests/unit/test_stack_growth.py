"""What a long-lived process keeps of what has come and gone: a bounded part."""

from __future__ import annotations

import subprocess
from unittest.mock import AsyncMock

from gymgate.config import ReplayEndpoint
from gymgate.gateway.server import KEPT_REPLAYS, Gateway
from gymgate.stack.client import Lease
from gymgate.stack.leases import Leases


def recording(index: int) -> ReplayEndpoint:
    return ReplayEndpoint(rollouts=("r.jsonl",), index=index)


async def test_a_gateway_keeps_the_recordings_that_were_used_last() -> None:
    gateway = Gateway()
    first = gateway._backend(recording(0))
    for index in range(1, 3 * KEPT_REPLAYS):
        gateway._backend(recording(index))
        assert gateway._backend(recording(0)) is first, "in use all along"
        assert len(gateway._replays) <= KEPT_REPLAYS
    assert list(gateway._replays)[-2:] == [recording(3 * KEPT_REPLAYS - 1), recording(0)]


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
