"""Which failed attempts of an HTTP request are made again, and after how long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from gymgate.errors import PolicyError

LONGEST_BACKOFF_S = 8.0
LONGEST_RETRY_AFTER_S = 60.0
BUSY = frozenset({408, 409, 425, 429})
"""Statuses with which a healthy server asks for another attempt."""

Result = TypeVar("Result")


class Retryable(Exception):
    """One attempt failed in a way that another may not."""

    def __init__(self, error: PolicyError) -> None:
        super().__init__(error.message)
        self._error = error

    def error(self, retries: int) -> PolicyError:
        """The error to raise when no attempt is left."""
        if retries:
            self._error.message += f" (after {retries + 1} attempts)"
            self._error.args = (self._error.message,)
        return self._error

    def delay_s(self, retries: int) -> float:
        """Seconds to wait before retry number `retries`: what the server asked for, else a growing random time."""
        if self._error.retry_after_s is not None:
            return min(self._error.retry_after_s, LONGEST_RETRY_AFTER_S)
        longest: float = min(0.5 * 2.0 ** (retries - 1), LONGEST_BACKOFF_S)
        return longest * random.uniform(0.5, 1.0)


async def with_retries(attempt: Callable[[int], Awaitable[Result]], max_retries: int) -> tuple[Result, int]:
    """Call `attempt` with the number of retries so far until it raises no `Retryable`.

    Returns its result and the number of retries; raises the `PolicyError` of the last attempt when none is left.
    """
    retries = 0
    while True:
        try:
            return await attempt(retries), retries
        except Retryable as failure:
            if retries == max_retries:
                raise failure.error(retries) from failure.__cause__
            retries += 1
            await asyncio.sleep(failure.delay_s(retries))


def is_retried(status: int) -> bool:
    """Whether an answer with this status is worth another attempt."""
    return status in BUSY or status >= 500


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The seconds in `Retry-After` of an answer's headers, by lower-case name; `None` for none, or for a date."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None
