"""Which failed attempts of an HTTP request are made again, and after how long."""

from __future__ import annotations

import asyncio
import email.utils
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from gymgate.core.errors import PolicyError

LONGEST_BACKOFF_S = 8.0
LONGEST_RETRY_AFTER_S = 60.0
LEAST_RETRY_AFTER_S = 1.0
"""Between requests to a server that refuses them all and asks for no wait."""
BUSY = frozenset({408, 409, 425, 429})
"""Statuses with which a healthy server asks for another attempt."""
RATE_LIMITED = 429
_QUOTA_USED_UP = frozenset(
    {
        *(
            "insufficient_quota",
            "credit_balance_exhausted",
            "billing_hard_limit_reached",
            "billing_not_active",
        ),
        *("organization_spend_limit_exceeded", "project_spend_limit_exceeded"),
        *("organization_usage_limit_exceeded", "exceeded_current_quota_error"),
    }
)
"""`code` or `type` of a 429 that lasts until somebody pays, of OpenAI and of those who copy it. The message is no sign of it:
Gemini's says "You exceeded your current quota" for a limit per minute, too."""

Result = TypeVar("Result")
Note = Callable[[int], None]
"""Told before each attempt of a call how many were made before it: a call may fail or be cancelled after any of them."""


def unnoted(retries: int) -> None:
    """The `Note` of whom the number does not concern."""


class Retryable(Exception):
    """One attempt failed in a way that another may not.

    With `waits` the next attempt is made when the server asks for it (`Retry-After`).
    """

    def __init__(self, error: PolicyError, *, waits: bool = True) -> None:
        super().__init__(error.message)
        self.is_rate_limit = error.status_code == RATE_LIMITED
        self._error = error
        self._after_s = error.retry_after_s if waits else None

    def error(self, retries: int) -> PolicyError:
        """The error to raise when no attempt is left."""
        if retries:
            self._error.message += f" (after {retries + 1} attempts)"
            self._error.args = (self._error.message,)
        return self._error

    def delay_s(self, retries: int) -> float:
        """Seconds to wait before retry number `retries`: what the server asked for, else a growing random time.

        A rate limit without a wait, which retries do not end, gets a growing short one.
        """
        growth = 2.0 ** min(retries - 1, 20)
        if self._after_s is not None:
            least = min(0.01 * growth, LEAST_RETRY_AFTER_S) if self.is_rate_limit else 0.0
            return min(max(self._after_s, least), LONGEST_RETRY_AFTER_S)
        longest: float = min(0.5 * growth, LONGEST_BACKOFF_S)
        return longest * random.uniform(0.5, 1.0)


async def with_retries(
    attempt: Callable[[int], Awaitable[Result]],
    max_retries: int,
    *,
    rate_limit_s: float = math.inf,
    at_once: int = 0,
) -> Result:
    """Call `attempt` with the number of retries so far until it raises no `Retryable`.

    A rate limit (429) does not count among the retries: it is waited out, for `rate_limit_s` or until the caller cancels.
    Without any retries it fails, too. `at_once` further retries come first and are made without a delay. Raises the
    `PolicyError` of the last attempt when none is left.
    """
    retries = failures = 0
    deadline = time.monotonic() + rate_limit_s
    while True:
        try:
            return await attempt(retries)
        except Retryable as failure:
            failures += not failure.is_rate_limit or max_retries == 0
            if failures > max_retries + at_once or time.monotonic() > deadline:
                raise failure.error(retries) from failure.__cause__
            retries += 1
            if retries > at_once:
                await asyncio.sleep(failure.delay_s(retries - at_once))


def is_retried(status: int, headers: Mapping[str, str]) -> bool:
    """Whether an answer with this status and headers, by lower-case name, is worth another attempt."""
    return (status in BUSY or status >= 500) and headers.get("x-should-retry") != "false"


def is_quota_used_up(status: int, body: Any) -> bool:
    """Whether an error says that the account may send nothing more, for a long time."""
    error = body.get("error") if isinstance(body, dict) else None
    if status != RATE_LIMITED or not isinstance(error, dict):
        return False
    return not _QUOTA_USED_UP.isdisjoint(
        name for name in (error.get("code"), error.get("type")) if isinstance(name, str)
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The seconds that an answer's headers, by lower-case name, ask to wait; `None` if they do not ask."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) / unit)
        except (KeyError, ValueError):
            continue
    try:
        return max(0.0, email.utils.parsedate_to_datetime(headers["retry-after"]).timestamp() - time.time())
    except (KeyError, ValueError, OverflowError):
        return None
