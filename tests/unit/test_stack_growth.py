"""What a long-lived process keeps of what has come and gone: a bounded part."""

from __future__ import annotations

import subprocess
from unittest.mock import AsyncMock

from gymgate.stack.client import Lease
from gymgate.stack.leases import Leases


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
