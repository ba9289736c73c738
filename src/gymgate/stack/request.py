"""A rollout that somebody wants, and which environment and agent it goes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gymgate.config import Endpoint, RolloutLimits
from gymgate.errors import ConfigError, DataError
from gymgate.gateway import Backend
from gymgate.stack.environment import Environment

Judge = Endpoint | Backend | Literal["policy"]


@dataclass(frozen=True)
class Request:
    """A rollout that somebody wants."""

    row: Mapping[str, Any]
    policy: Endpoint | Backend
    judges: Mapping[str, Judge]
    judge_policy: Endpoint | Backend | None
    """Answers where a judge is the policy; `None`: the policy's endpoint."""
    rollout_id: str
    environment: str | None = None
    agent: str | None = None
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    record_bodies: bool = True


def choose(
    environments: Mapping[str, Environment],
    row: Mapping[str, Any],
    environment: str | None,
    agent: str | None,
) -> tuple[Environment, str]:
    """The environment and agent for a row: as named, else by the row's `agent_ref`, else the default."""
    check_row(row)
    if environment is not None and environment not in environments:
        known = ", ".join(sorted(environments))
        raise ConfigError(f"environment {environment!r} is not in this stack; there is {known}")
    places = [environments[environment]] if environment else list(environments.values())
    name = agent or agent_of(row)
    if name is None:
        return _default(places)
    found = [place for place in places if name in place.agents]
    if len(found) == 1:
        return found[0], name
    if found:
        raise ConfigError(f"agent {name!r} is in {', '.join(e.name for e in found)}; name the environment")
    known = ", ".join(sorted(agent for place in places for agent in place.agents))
    where = f"environment {environment!r}" if environment else "this stack"
    raise ConfigError(f"agent {name!r} is not in {where}; there is {known}")


def _default(places: list[Environment]) -> tuple[Environment, str]:
    if len(places) > 1:
        names = ", ".join(place.name for place in places)
        raise ConfigError(f"the row has no agent_ref, so it could go to any of {names}; name the environment")
    place = places[0]
    assert place.default_agent is not None
    return place, place.default_agent


def check_row(row: Mapping[str, Any]) -> None:
    """Raise `DataError` for a row that no agent can take."""
    params = row.get("responses_create_params")
    if not isinstance(params, dict):
        raise DataError(
            "row has no responses_create_params (an object with input); benchmarks' raw rows need preparing first"
        )
    if "input" not in params:
        raise DataError("row's responses_create_params has no input")


def agent_of(row: Mapping[str, Any]) -> str | None:
    """The agent that the row names, if it does."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, dict) else reference
    return name if isinstance(name, str) and name else None
