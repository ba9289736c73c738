"""A policy that is not there yet, or not for a while: what waits for it does not spend its retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gymgate.config import HTTPEndpoint
from gymgate.errors import PolicyError
from gymgate.gateway.backends.ready import wait_until_ready
from gymgate.rollout import RolloutError
from gymgate.stack import Policy


class PolicyWait:
    """Waits for a policy's endpoint, on behalf of every rollout at once."""

    def __init__(self, policy: Policy, within_s: float | None, say: Callable[[str], None]) -> None:
        """`within_s` seconds each time; 0: the endpoint is asked once before the start, `None`: never."""
        self._endpoint = policy if isinstance(policy, HTTPEndpoint) else None
        self._within_s = within_s
        self._say = say
        self._waiting: asyncio.Task[None] | None = None

    async def at_start(self) -> None:
        """Raises `PolicyError` if the endpoint does not answer in time."""
        if self._endpoint is not None and self._within_s is not None:
            await wait_until_ready(self._endpoint, self._within_s, self._say)

    async def _back(self) -> None:
        assert self._endpoint is not None
        assert self._within_s is not None
        await wait_until_ready(self._endpoint, self._within_s, self._say, every=False)

    async def after(self, error: RolloutError) -> None:
        """After a failed attempt: if it is the policy's fault and may pass, until the endpoint, or one
        of its replicas, answers again.

        Raises `PolicyError`, which ends the run with nothing given up, if that takes too long.
        """
        if not self._within_s or self._endpoint is None or error.kind != "policy" or not error.retryable:
            return
        if self._waiting is None or self._waiting.done():
            self._waiting = asyncio.create_task(self._back())
        try:
            await asyncio.shield(self._waiting)
        except PolicyError as late:
            raise PolicyError(f"stopped: {late.message}", endpoint=late.endpoint, retryable=True) from late
