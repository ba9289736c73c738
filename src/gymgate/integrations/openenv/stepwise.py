"""Which environments a client can play in the agent's place. Imports no OpenEnv, so that a refusal comes at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gymgate.core.errors import ConfigError
from gymgate.gym.catalog import EnvConfig, Environment
from gymgate.integrations.openenv.episode import MAX_STEPS, Episode, GymnasiumEpisode, ToolEpisode

STEPWISE_AGENTS: Mapping[str, type[Episode]] = {
    "simple_agent": ToolEpisode,
    "gymnasium_agent": GymnasiumEpisode,
}
"""Agents in whose place a client can play."""


@dataclass(frozen=True)
class StepwiseEnvironment:
    """An environment whose agent's part a client can play."""

    name: str
    agent: str
    """Instance name of the agent that the client stands for."""
    server: str
    """Instance name of its resources server."""
    kind: type[Episode]
    max_steps: int


def stepwise_environment(
    environment: Environment, config: EnvConfig, agent: str | None = None
) -> StepwiseEnvironment:
    """Return how a client plays an environment. Raises `ConfigError`, with the reason, if its agent is more than a loop.

    `agent` is an instance name; the default is the config's first agent.
    """
    agents = {server.name: server for server in config.agents}
    refused = f"environment {environment.name!r} cannot be served:"
    if not agents:
        raise ConfigError(f"{refused} config {config.name!r} has no agent")
    if agent is not None and agent not in agents:
        raise ConfigError(
            f"environment {environment.name!r} has no agent {agent!r}; available: {', '.join(agents)}"
        )
    chosen = agents[agent] if agent else next(iter(agents.values()))
    if chosen.type not in STEPWISE_AGENTS:
        raise ConfigError(
            f"{refused} its agent {chosen.name!r} is a {chosen.type!r}, which runs its own loop; only a client of "
            f"{' or '.join(STEPWISE_AGENTS)} can play the agent's part"
        )
    owners = [server for server in config.environment_servers if chosen.name in server.called_agents]
    if several := next((server for server in owners if len(server.called_agents) > 1), None):
        raise ConfigError(
            f"{refused} environment server {several.name!r} lets {', '.join(several.called_agents)} talk, and a client can play "
            "one agent only"
        )
    if config.judges:
        judges = ", ".join(sorted(config.judges))
        raise ConfigError(f"{refused} it asks a judge ({judges}), and only a rollout notices its failures")
    if chosen.block.get("skip_verification") or not chosen.resources_server:
        raise ConfigError(f"{refused} its agent {chosen.name!r} has no resources server that scores it")
    max_steps = chosen.block.get("max_steps")
    return StepwiseEnvironment(
        environment.name,
        chosen.name,
        chosen.resources_server,
        STEPWISE_AGENTS[chosen.type],
        max_steps if isinstance(max_steps, int) else MAX_STEPS,
    )
