"""How often an environment's servers may restart, and how long to wait before each restart."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0


class Restarts:
    """At most `limit` restarts within `window_s` seconds.

    The first restart in a window has no wait. Each further one waits twice as long as the one before: 0.5 s, 1 s, 2 s, up
    to 30 s.
    """

    def __init__(self, limit: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.window_s = window_s
        self.total = 0
        """Restarts since the stack started."""
        self._clock = clock
        self._times: deque[float] = deque()

    @property
    def recent(self) -> int:
        """Restarts within the last `window_s` seconds."""
        while self._times and self._times[0] <= self._clock() - self.window_s:
            self._times.popleft()
        return len(self._times)

    def next_wait(self) -> float | None:
        """Count one more restart and return the seconds to wait before it; `None` if the limit forbids it."""
        recent = self.recent
        if recent >= self.limit:
            return None
        wait = min(FIRST_WAIT_S * 2.0 ** min(recent - 1, 16), LONGEST_WAIT_S) if recent else 0.0
        self._times.append(
            self._clock() + wait
        )  # when it is made: a long wait must not count into the window
        self.total += 1
        return wait
