"""Tokens that the calls of a rollout used, of a stored one or of one that just finished."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gymgate.core.config import POLICY
from gymgate.rollouts import ModelCall, Rollout

TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
Whole = Annotated[int, Field(strict=True, ge=0, le=1 << 53)]
Seconds = Annotated[float, Field(strict=True, ge=-1e10, le=1e10)]
"""So many that sums of a few are still moments that a calendar has."""
Text = Annotated[str, Field(strict=True)]
Name = Annotated[str, Field(strict=True, pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$")]
"""On one line: it is printed, and a table's lines are not to be forged."""
Tokens = dict[str, int | None]
"""`calls` and each of `TOKENS`, for one rollout and model server."""


class Stored(BaseModel):
    """Base of what is read of a line. Fields that nothing counts are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class StoredUsage(Stored):
    """Token counts of one call; `None` where the endpoint did not say."""

    input_tokens: Whole | None = None
    output_tokens: Whole | None = None
    cached_tokens: Whole | None = None
    reasoning_tokens: Whole | None = None


class StoredCall(Stored):
    """What is counted of a model call."""

    model_server: Name = POLICY
    status_code: Whole | None = None
    usage: StoredUsage = StoredUsage()
    started_s: Seconds = 0.0
    duration_s: Seconds = 0.0
    request: Any = None
    details: Any = None


Calls = Iterable[StoredCall | ModelCall]
"""Calls of a stored rollout, or of one that just finished."""


def tokens_of(rollout: Rollout) -> dict[str, Tokens | None]:
    """Return the tokens that a rollout used, by model server."""
    return tokens_of_calls(rollout.calls)


def tokens_of_calls(calls: Calls) -> dict[str, Tokens | None]:
    """Return the tokens of calls by model server; `None` where those of a call are unknown.

    A call that was refused (4xx) used none. One that failed otherwise may have been paid all the same.
    """
    by_server: dict[str, Tokens | None] = {}
    for call in calls:
        usage = call.usage
        tokens = by_server.setdefault(call.model_server, no_tokens())
        if tokens is None or 400 <= (call.status_code or 0) < 500:
            continue
        if usage.input_tokens is None or usage.output_tokens is None:
            by_server[call.model_server] = None
            continue
        tokens["calls"] = (tokens["calls"] or 0) + 1
        for name in TOKENS:
            if (count := getattr(usage, name)) is not None:
                tokens[name] = (tokens[name] or 0) + count
    return by_server


def no_tokens() -> Tokens:
    """Return the tokens of no call."""
    return {
        "calls": 0,
        "input_tokens": 0,
        "cached_tokens": None,
        "output_tokens": 0,
        "reasoning_tokens": None,
    }
