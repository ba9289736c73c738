"""What crosses processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from gymgate.core import errors
from gymgate.core.config import CallableEndpoint, HTTPEndpoint, ReplayEndpoint, RolloutLimits
from support.stacks import stack_config


def pickled() -> list[Any]:
    endpoint = HTTPEndpoint(base_url="http://h/v1", api_key_env="KEY", sampling=(("stop", ("a", "b")),))
    found: list[Any] = [endpoint, CallableEndpoint(name="p"), ReplayEndpoint(rollouts=("rollouts.jsonl",))]
    found += [RolloutLimits(timeout_s=3), stack_config(models={"judge_model": endpoint}, share="machine")]
    for leaf in vars(errors).values():
        if isinstance(leaf, type) and issubclass(leaf, errors.GymgateError):
            found.append(leaf("what failed", **dict.fromkeys(leaf.fields, None)))
    return found


def crosses(dumps: Callable[[Any], bytes]) -> None:
    """Everything comes out as it went in."""
    for value in pickled():
        again = pickle.loads(dumps(value))
        assert type(again) is type(value)
        assert str(again) == str(value)
        if not isinstance(value, Exception):
            assert again == value
            assert hash(again) == hash(value)
