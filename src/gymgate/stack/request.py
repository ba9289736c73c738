"""A rollout that somebody wants, and which environment and agent it goes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gymgate.config import Endpoint, JudgeEndpoint, RolloutLimits
from gymgate.errors import ConfigError
from gymgate.gateway import Backend
from gymgate.stack.environment import Environment

Judge = JudgeEndpoint | Backend


@dataclass(frozen=True)
class Request:
    """A rollout that somebody wants."""

    row: bytes
    """As JSON: an object that `check_row` let pass."""
    policy: Endpoint | Backend
    judges: Mapping[str, Judge]
    judge_policy: Endpoint | Backend | None
    """Answers where a judge is the policy; `None`: the policy's endpoint."""
    rollout_id: str
    environment: str | None = None
    agent: str | None = None
    """The agent asked for, or else named by the row."""
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    record_bodies: bool = True


def choose(
    environments: Mapping[str, Environment], environment: str | None, agent: str | None
) -> tuple[Environment, str]:
    """The environment and agent of these names, or the default ones."""
    if environment is not None and environment not in environments:
        known = ", ".join(sorted(environments))
        raise ConfigError(f"environment {environment!r} is not in this stack; there is {known}")
    places = [environments[environment]] if environment else list(environments.values())
    name = agent
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
