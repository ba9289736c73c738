"""What is known of single environments, kept as data (`known.json`): causes of differences, settings and shapes of
recordings, places of judges' texts."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

import orjson

Setting = tuple[str, str | int | float | bool | None]


@cache
def _known() -> dict[str, Any]:
    data: dict[str, Any] = orjson.loads((resources.files("gymgate.check") / "known.json").read_bytes())
    return data


def judge_texts(environment: str) -> tuple[str, ...]:
    """Dotted paths at which an environment's record holds what its judge said, as text."""
    return tuple(_known()["judge_texts"].get(environment, ()))


def cause_of(environment: str, version: str, servers: Iterable[str] = ()) -> str | None:
    """Why an environment's rewards differ from the recorded ones, where somebody found out: for itself or for one of
    its resources servers."""
    for name in (environment, *servers):
        if found := _of(name, version, "causes"):
            return str(found)
    return None


def replayed_with(environment: str, version: str) -> tuple[Setting, ...]:
    """Settings that an environment is replayed with and that its config has otherwise: those that its rollouts were
    recorded with, and those that point an agent with an endpoint of its own at the policy."""
    return tuple((_of(environment, version, "replayed_with") or {}).items())


def own_shape(environment: str) -> dict[str, str]:
    """For an environment that records in a shape of its own: `row`, the record's field whose value the row holds;
    `said`, the field with the policy's words. Empty for all others."""
    shape: dict[str, str] = _known()["shapes"].get(environment, {})
    return shape


def makes_prompts(agent_type: str) -> bool:
    """Whether an agent of that type asks the policy with prompts of its own, which no record holds."""
    return agent_type in _known()["own_prompts"]["agents"]


def neutral_file(name: str) -> Any:
    """Content of a file that a setting of that name can point to without changing anything; `None`: not known."""
    return _known()["files"].get(name)


def _of(environment: str, version: str, section: str) -> Any:
    known = _known()[section]
    return known.get(f"{environment}@{version}") or known.get(environment)
