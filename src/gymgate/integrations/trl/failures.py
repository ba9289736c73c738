"""What failed of a batch, and when a training of nothing but failures ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from gymgate.errors import from_wire
from gymgate.integrations.training.figures import Attempt

logger = logging.getLogger(__name__)

GIVE_UP_AFTER = 3
"""Batches in a row without a rollout that did not fail, after which training ends with the reason."""


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
        if self.in_a_row < GIVE_UP_AFTER or not failed:
            return
        batches, self.in_a_row = self.in_a_row, 0
        (kind, message), _ = failed[0]
        told = f"every rollout of {batches} batches failed, of the last one {len(attempts)}, most often: {message}"
        raise from_wire({"error": kind, "message": told})


def failures(attempts: Sequence[Attempt]) -> list[tuple[tuple[str, str], int]]:
    """Each distinct failure (type of error, message) with its count, the most frequent first."""
    errors = [attempt.rollout.error for attempt in attempts if attempt.rollout.error is not None]
    return Counter((error.type, f"{error.kind}: {error.message}") for error in errors).most_common()
