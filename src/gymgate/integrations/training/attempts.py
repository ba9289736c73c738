"""Rollouts of one process, on a stack that starts with the first of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from gymgate.config import RolloutLimits, StackConfig
from gymgate.errors import StackLostError
from gymgate.integrations.training.figures import Attempt
from gymgate.rollout import Rollout, RolloutError
from gymgate.stack import Stack, connect
from gymgate.tokens import TokenPolicy

logger = logging.getLogger(__name__)

GRACE_S = 30.0
"""Seconds beyond its deadline after which a rollout is given up here."""


class Attempts:
    """Attempts at rows; for one event loop."""

    def __init__(self, config: StackConfig, limits: RolloutLimits) -> None:
        self.config = config
        self.limits = limits
        self._stack: Stack | None = None
        self._connecting = asyncio.Lock()

    async def start(self) -> Stack:
        """Connect to the stack, starting it if it does not run. Returns when it is up, raises why it is not."""
        async with self._connecting:
            if self._stack is None:
                self._stack = await connect(self.config, progress=lambda line: logger.info("%s", line))
            return self._stack

    async def attempt(self, environment: str, row: Mapping[str, Any], policy: TokenPolicy) -> Attempt:
        """One rollout. A failure comes back as data, the stack's loss too: the next attempt connects again.

        Returns within the rollout deadline and `GRACE_S`, once the stack is up.
        """
        stack, conversation = await self.start(), policy.conversation()
        try:
            async with asyncio.timeout(self.limits.timeout_s + GRACE_S):
                rollout: Rollout = await stack.run(
                    row, policy=conversation, environment=environment, limits=self.limits, record_bodies=False
                )
        except (StackLostError, TimeoutError) as error:
            await self._lose(stack)
            rollout = _lost(environment, error)
        shown = list(conversation.turns[0].prompt_ids) if conversation.turns else []
        return Attempt(rollout, conversation.segments, conversation.turns, shown)

    async def _lose(self, stack: Stack) -> None:
        if self._stack is stack:
            await self.close()

    async def close(self) -> None:
        """Give the stack back. Idempotent."""
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.close()


def _lost(environment: str, error: Exception) -> Rollout:
    """The rollout of a stack that is gone, or that did not keep to the deadline."""
    told = str(error) or "the stack did not end the rollout at its deadline"
    described = RolloutError(kind="infrastructure", message=told, type="StackLostError", retryable=True)
    return Rollout(id="lost", environment=environment, agent="", status="failed", error=described)
