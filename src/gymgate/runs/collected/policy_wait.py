"""Waits for a policy that is not up yet, or is gone for a while, so that this spends no retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gymgate.core.config import HTTPEndpoint
from gymgate.core.errors import PolicyError
from gymgate.gateway.backends.ready import wait_until_ready
from gymgate.rollouts import RolloutError
from gymgate.stack import Policy


class PolicyWait:
    """Waits for a policy's endpoint on behalf of every rollout at once."""

    def __init__(self, policy: Policy, within_s: float | None, log: Callable[[str], None]) -> None:
        """Wait up to `within_s` seconds each time; 0: ask the endpoint once before the start; `None`: never."""
        self._endpoint = policy if isinstance(policy, HTTPEndpoint) else None
        self._within_s = within_s
        self._log = log
        self._waiting: asyncio.Task[object] | None = None

    async def at_start(self) -> None:
        """Raises `PolicyError` if the endpoint does not answer in time."""
        if self._endpoint is not None and self._within_s is not None:
            await wait_until_ready(self._endpoint, self._within_s, self._log)

    async def after(self, error: RolloutError) -> None:
        """After a failed attempt that is the policy's fault and may pass: wait until one of its replicas answers.

        Raises `PolicyError`, which ends the run with nothing given up, if none answers in time.
        """
        if not self._within_s or self._endpoint is None or error.kind != "policy" or not error.retryable:
            return
        if self._waiting is None or self._waiting.done():
            again = wait_until_ready(self._endpoint, self._within_s, self._log, every=False)
            self._waiting = asyncio.create_task(again)
        try:
            await asyncio.shield(self._waiting)
        except PolicyError as late:
            raise PolicyError(f"stopped: {late.message}", endpoint=late.endpoint, retryable=True) from late

    def close(self) -> None:
        """Stop waiting."""
        if self._waiting is not None:
            self._waiting.cancel()
