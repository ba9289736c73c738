"""Rollouts of one process, on a stack that starts with the first of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gymgate.config import RolloutLimits, StackConfig
from gymgate.errors import GymgateError, from_wire
from gymgate.integrations.trl.batch import Attempt
from gymgate.rollout import Rollout
from gymgate.stack import Stack, connect
from gymgate.tokens import TokenPolicy

logger = logging.getLogger(__name__)

GIVE_UP_AFTER = 3
"""Batches in a row without a rollout that did not fail, after which training ends with the reason."""


class Attempts:
    """Attempts at rows; for one event loop."""

    def __init__(self, config: StackConfig, limits: RolloutLimits) -> None:
        self.config = config
        self.limits = limits
        self._stack: Stack | None = None

    async def start(self) -> None:
        """Connect to the stack, starting it if it does not run. Returns when it is up, raises why it is not."""
        if self._stack is None:
            self._stack = await connect(self.config, progress=lambda line: logger.info("%s", line))

    async def attempt(self, environment: str, row: Mapping[str, Any], policy: TokenPolicy) -> Attempt:
        """One rollout; needs `start`. A failure comes back as data."""
        assert self._stack is not None
        conversation = policy.conversation()
        rollout: Rollout = await self._stack.run(
            row, policy=conversation, environment=environment, limits=self.limits, record_bodies=False
        )
        shown = list(conversation.turns[0].prompt_ids) if conversation.turns else []
        return Attempt(rollout, conversation.segments, conversation.turns, shown)

    async def close(self) -> None:
        """Give the stack back. Idempotent."""
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.close()


class FailureWatch:
    """Logs what failed, and ends a training in which nothing but failures come."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def see(self, attempts: Sequence[Attempt]) -> None:
        """Raise the most frequent error once `GIVE_UP_AFTER` batches in a row had failures only."""
        failed = failures(attempts)
        for line, count in failed:
            logger.warning("rollouts failed: %d x %s", count, line[1])
        self.in_a_row = self.in_a_row + 1 if sum(count for _, count in failed) == len(attempts) else 0
        if self.in_a_row >= GIVE_UP_AFTER and failed:
            raise self._error(*failed[0][0], len(attempts))

    def _error(self, kind: str, message: str, number: int) -> GymgateError:
        told = f"every rollout of {self.in_a_row} batches failed, of the last one {number}, most often: {message}"
        return from_wire({"error": kind, "message": told})


def failures(attempts: Sequence[Attempt]) -> list[tuple[tuple[str, str], int]]:
    """Each distinct failure (type of error, message) with its count, the most frequent first."""
    errors = [attempt.rollout.error for attempt in attempts if attempt.rollout.error is not None]
    return Counter((error.type, f"{error.kind}: {error.message}") for error in errors).most_common()
