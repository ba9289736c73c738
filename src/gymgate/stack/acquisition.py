"""The way to a stack: a daemon of this machine, the stacks of a Ray cluster, or a running stack by its socket's path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gymgate.core.config import RayCluster, StackConfig, checked
from gymgate.gym.runtime.command import Progress
from gymgate.stack.client.identity import identity_of
from gymgate.stack.client.leases import Leases, current_leases
from gymgate.stack.client.stack import Lease, Stack
from gymgate.stack.paths import salt
from gymgate.stack.ray.pool import RayPool


@asynccontextmanager
async def acquire(
    config: StackConfig, *, where: RayCluster | None = None, progress: Progress | None = None
) -> AsyncIterator[Stack]:
    """Yield the config's stack, started if it does not run. The lease is given back at the end of the block.

    `where` is a Ray cluster to run it on, instead of `config.ray`; the stack is then several, on the cluster's nodes.

    `progress` gets one line per step while the stack starts. Processes and event loops that acquire one config share the
    stack; its daemon counts their leases. Raises `ConfigError`, `NeedMissingError`, `SetupError` or `StackStartError`,
    with the end of the failing server's log, if the stack cannot be started.
    """
    stack = await connect(config, where=where, progress=progress)
    try:
        yield stack
    finally:
        await stack.close()


@checked
async def connect(
    config: StackConfig,
    *,
    where: RayCluster | None = None,
    progress: Progress | None = None,
    reconnect: bool = False,
) -> Stack:
    """Acquire a stack without a block: `await stack.close()` gives the lease back. See `acquire`.

    With `reconnect`, a lost stack is restarted by the next `Stack.run`. Rollouts that were running on it fail with
    `StackLostError`.
    """
    if where is not None:
        config = config.model_copy(update={"ray": where})
    leases = current_leases()
    return await Stack._open(
        config, lambda: _take(leases, config, progress), leases.close, reconnect=reconnect
    )


async def _take(leases: Leases, config: StackConfig, progress: Progress | None) -> Lease:
    """Take a lease on the config's stack."""
    leases.drop_closed()
    if config.server is not None:
        return await leases.greet(await leases.join(Path(config.server)), config, progress)
    identity = await asyncio.to_thread(lambda: identity_of(config, salt()))
    if config.ray is not None:
        return await leases.greet(await RayPool(config, identity).connect(), config, progress)
    return await leases.take(config, identity, progress)
