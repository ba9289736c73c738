"""How many rollouts run at once, how often a failed one is tried again, and when a run warns or stops."""

from __future__ import annotations

import random
import typing
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from gymgate.core.config import Config
from gymgate.core.errors import ConfigError, ErrorKind
from gymgate.rollouts import Rollout, outcome_of

DEFAULT_BUDGETS: Mapping[ErrorKind, int] = MappingProxyType(
    {"infrastructure": 3, "policy": 3, "timeout": 1, "environment": 1, "data": 0}
)
"""Retries of a failed rollout, by the error's class."""
LONGEST_WAIT_S = 30.0


class Pace(Config):
    """How hard a run goes, and when it warns or stops."""

    concurrency: int = Field(default=64, ge=1)
    """Concurrent rollouts."""
    budgets: Annotated[
        Mapping[ErrorKind, Annotated[int, Field(ge=0)]],
        BeforeValidator(lambda value: {**DEFAULT_BUDGETS, **value} if isinstance(value, Mapping) else value),
    ] = Field(default_factory=lambda: dict(DEFAULT_BUDGETS))
    """Retries of a failed rollout, by the class of its error. Those that are not set keep this default."""
    fsync_s: float = Field(default=1.0, ge=0)
    """Seconds between two syncs of the run's directory to disk; 0: after each rollout."""
    stall_s: float = Field(default=120.0, gt=0)
    """Seconds without a finished rollout until a warning."""
    failures_in_a_row: int | None = Field(default=None, ge=0)
    """Consecutive permanent failures that end the run; 0: never; `None`: twice the concurrency, 50 at least."""

    def __init__(self, concurrency: int = 64, **fields: Any) -> None:
        super().__init__(**{"concurrency": concurrency, **fields})

    @property
    def most_failures_in_a_row(self) -> int:
        """`failures_in_a_row` with its default; 0: no limit."""
        if self.failures_in_a_row is not None:
            return self.failures_in_a_row
        return max(50, 2 * self.concurrency)


def parse_budgets(texts: Iterable[str]) -> dict[ErrorKind, int]:
    """`CLASS=N`, or `N` for every class but data. Raises `ConfigError`."""
    budgets: dict[ErrorKind, int] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        kinds = typing.get_args(ErrorKind)
        if not number.isdecimal() or (equals and name not in kinds):
            raise ConfigError(f"--retries {text!r}: write N or CLASS=N, CLASS one of {', '.join(kinds)}")
        for kind in [name] if equals else [kind for kind in kinds if kind != "data"]:
            budgets[typing.cast(ErrorKind, kind)] = int(number)
    return budgets


def may_retry(rollout: Rollout, failures: Mapping[str, int], budgets: Mapping[ErrorKind, int]) -> bool:
    """Whether a retry is left; `failures` counts the failed attempts so far, this one included, by class."""
    if rollout.error is None or not outcome_of(rollout).retryable:
        return False
    kind = rollout.error.kind
    return failures.get(kind, 0) <= budgets.get(kind, 0)


def wait_s(failures: int) -> float:
    """Seconds before the next attempt: 1, 2, 4, ... up to 30, less a random part of up to a half."""
    longest: float = min(2.0 ** (failures - 1), LONGEST_WAIT_S)
    return longest * random.uniform(0.5, 1.0)


def fitting_concurrency(requested: int, most: int) -> tuple[int, str | None]:
    """At most `requested` rollouts, and a message if the stack, which runs at most so many at once, allows fewer."""
    if requested <= most:
        return requested, None
    return most, f"concurrency lowered from {requested} to {most}: its open files (ulimit -n) allow no more"
