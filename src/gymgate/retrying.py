"""Which failed attempts of an HTTP request are made again, and after how long."""

from __future__ import annotations

import random

import aiohttp

from gymgate.errors import PolicyError

LONGEST_BACKOFF_S = 8.0
LONGEST_RETRY_AFTER_S = 60.0
_RETRIED = frozenset({408, 409, 425, 429})


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


def is_retried(status: int) -> bool:
    """Whether an answer with this status is worth another attempt."""
    return status in _RETRIED or status >= 500


def retry_after_s(response: aiohttp.ClientResponse) -> float | None:
    """Seconds; a date is not worth parsing for a wait of at most a minute."""
    try:
        return max(0.0, float(response.headers["Retry-After"]))
    except (KeyError, ValueError):
        return None
