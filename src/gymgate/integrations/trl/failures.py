"""What failed of a batch, and when a training of nothing but failures ends."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from gymgate.errors import from_wire
from gymgate.integrations.training.figures import Attempt

logger = logging.getLogger(__name__)

GIVE_UP_AFTER = 3
"""Batches in a row in which every rollout failed, after which training ends with the reason."""
PATIENCE_S = 300.0
"""Seconds of failures only before training ends, where the failures can pass: a server that restarts takes minutes."""
MAX_PAUSE_S = 30.0


class FailureWatch:
    """Logs what failed, and ends a training in which every rollout fails."""

    def __init__(self, batch: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`batch` is the number of rollouts that count as one batch; `None`: whatever `see` gets at once is one."""
        self.batch = batch
        self.clock = clock
        self._since: float | None = None
        self._forget()

    def see(self, attempts: Sequence[Attempt]) -> None:
        """Raise the most frequent error once `GIVE_UP_AFTER` batches in a row had failures only.

        Where another attempt may succeed (`retryable`), `PATIENCE_S` seconds must have passed too.
        """
        failed = failures(attempts)
        for line, count in failed:
            logger.warning("rollouts failed: %d x %s", count, line[1])
        if not failed or sum(count for _, count in failed) < len(attempts):
            self._forget()
            return
        self._seen += len(attempts)
        self._batches += len(attempts) / (self.batch or len(attempts))
        self._since = self.clock() if self._since is None else self._since
        self._may_pass = any(
            attempt.rollout.error is not None and attempt.rollout.error.retryable for attempt in attempts
        )
        waited_s = self.clock() - self._since
        if self._batches < GIVE_UP_AFTER or (self._may_pass and waited_s < PATIENCE_S):
            return
        (kind, message), _ = failed[0]
        told = (
            f"every rollout of {self._batches:.0f} batches failed ({self._seen} rollouts, {waited_s:.0f} s),"
            f" most often: {message}"
        )
        self._forget()
        raise from_wire({"error": kind, "message": told})

    @property
    def pause_s(self) -> float:
        """Seconds to wait before further rollouts, so that they are not spent on a server that restarts."""
        return min(MAX_PAUSE_S, 2.0 ** (self._batches - 1)) if self._may_pass else 0.0

    def _forget(self) -> None:
        self._seen = 0
        self._batches = 0.0
        self._since = None
        self._may_pass = False


def failures(attempts: Sequence[Attempt]) -> list[tuple[tuple[str, str], int]]:
    """Each distinct failure (type of error, message) with its count, the most frequent first."""
    errors = [attempt.rollout.error for attempt in attempts if attempt.rollout.error is not None]
    return Counter((error.type, f"{error.kind}: {error.message}") for error in errors).most_common()
