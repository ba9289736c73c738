"""What a program is at, and about how long it will take: on stderr, so that a table can be redirected."""

from __future__ import annotations

import sys
import time


class Steps:
    """Says which part of a program's work begins and, from the time of those done, about how long the rest takes.

    `total` is the weight of all of the work, in whatever unit `begin` is told; `limit_s`, if given, bounds the estimate.
    """

    def __init__(self, total: float, limit_s: float | None = None) -> None:
        self.total = total
        self.done = 0.0
        self._limit_s = limit_s
        self._running = 0.0
        self._started: float | None = None

    def begin(self, what: str, weight: float = 1.0) -> None:
        """The part before is done; `what` begins."""
        if self._started is None:
            self._started = time.perf_counter()
        self.done += self._running
        self._running = weight
        say(f"{what} [{self.elapsed_s:.0f} s so far{self._left()}]")

    @property
    def elapsed_s(self) -> float:
        """Since the first part began."""
        return 0.0 if self._started is None else time.perf_counter() - self._started

    def _left(self) -> str:
        if not self.done:
            return f", {self._limit_s:.0f} s at most" if self._limit_s is not None else ""
        left_s = self.elapsed_s / self.done * (self.total - self.done)
        return f", about {left_s:.0f} s left"


def say(text: str) -> None:
    print(f"benchmarks: {text}", file=sys.stderr, flush=True)
