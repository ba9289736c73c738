"""How often a failed rollout is tried again, by whose fault it was."""

from __future__ import annotations

import random
import typing
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from gymgate.errors import ConfigError, ErrorKind
from gymgate.rollout import Rollout, outcome_of

DEFAULT_BUDGETS: Mapping[ErrorKind, int] = MappingProxyType(
    {"infrastructure": 3, "policy": 3, "timeout": 1, "environment": 1, "data": 0}
)
"""Further attempts, by the error's class."""
LONGEST_WAIT_S = 30.0


def parse_budgets(texts: Iterable[str]) -> dict[ErrorKind, int]:
    """`CLASS=N` or `N` for every class but data, over the defaults. Raises `ConfigError`."""
    budgets = dict(DEFAULT_BUDGETS)
    for text in texts:
        name, equals, number = text.rpartition("=")
        kinds = typing.get_args(ErrorKind)
        if not number.isdecimal() or (equals and name not in kinds):
            raise ConfigError(f"--retries {text!r}: write N or CLASS=N, CLASS one of {', '.join(kinds)}")
        for kind in [name] if equals else [kind for kind in kinds if kind != "data"]:
            budgets[typing.cast(ErrorKind, kind)] = int(number)
    return budgets


def may_retry(rollout: Rollout, failures: Mapping[str, int], budgets: Mapping[ErrorKind, int]) -> bool:
    """Whether there is an attempt left; `failures` counts those before, this one included, by class."""
    if rollout.error is None or not outcome_of(rollout).retried:
        return False
    kind = rollout.error.kind
    return failures.get(kind, 0) <= budgets.get(kind, 0)


def wait_s(failures: int) -> float:
    """Seconds before the next attempt: 1, 2, 4, ... up to half a minute, less up to a half by chance."""
    longest: float = min(2.0 ** (failures - 1), LONGEST_WAIT_S)
    return longest * random.uniform(0.5, 1.0)
