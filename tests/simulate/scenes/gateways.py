"""A gateway on a host of a scene."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from invariants import Ledger
from parts import Gateway


@asynccontextmanager
async def gateway_on(host: Any, ledger: Ledger, **settings: Any) -> AsyncIterator[Gateway]:
    """Serve a gateway on a host. The ledger checks that none of its routes, calls and connections is left."""
    gateway, entered, done = Gateway(**settings), asyncio.Event(), asyncio.Event()

    async def serve() -> None:
        async with gateway:
            entered.set()
            await done.wait()

    serving = host.spawn(serve)
    await entered.wait()
    yield gateway
    ledger.left |= {
        "routes": lambda: len(gateway.routes),
        "calls under way": lambda: sum(gateway.in_flight.values()),
        "connections to policies": lambda: len(gateway._client._open),
    }
    done.set()
    await serving
