"""What runs a row: an agent, or the environment server that owns its episode.

A row goes to the environment server that it names, else to the one that its materialised taskset is routed to, else to the
only one that calls the agent that it names. Relays, which pass a row on to an agent, count and are then skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from gymgate.core.config import POLICY
from gymgate.core.errors import ConfigError
from gymgate.gym.catalog.needs import policy_servers, trained_agent
from gymgate.gym.inside.resolve import (
    AGENT_SERVER,
    AGENTS,
    ENVIRONMENT_SERVERS,
    MODELS,
    Node,
    ServerInstance,
    references,
    servers_of,
)
from gymgate.stack.daemon.routing import Strategy

ROUTES = "environment_server_routes"
"""The config's entry that maps materialised tasksets to environment servers."""


@dataclass(frozen=True)
class Destination:
    """What runs a row."""

    server: str
    """The agent or environment server that the row is posted to."""
    agent: str
    """The agent that stands for the policy, which the rollout is recorded with. Where there is none, the environment server."""
    strategy: Strategy
    policy_servers: frozenset[str]
    """Model servers whose calls are the policy's."""
    owns_episode: bool = False
    """Whether it is an environment server."""
    callers: Mapping[str, str] = field(default_factory=dict)
    """Model server -> the only agent of the episode that calls it."""
    stand_ins: frozenset[str] = frozenset()
    """The model servers that stand for the policy's, one for each of several agents."""
    taskset: str = ""
    """Of rows that name none."""
    untrainable: str | None = None
    """Why its calls cannot be trained on, with the setting that would help."""


def of_agent(agent: ServerInstance, strategy: Strategy, stand_in: str | None = None) -> Destination:
    """Return an agent that runs its rows itself; `stand_in` is the model server that it has in place of the policy's."""
    own = frozenset({stand_in} if stand_in is not None else ())
    return Destination(agent.name, agent.name, strategy, policy_servers(agent) | own, stand_ins=own)


def of_environment_server(server: ServerInstance, servers: Mapping[str, ServerInstance]) -> Destination:
    """Return an environment server as the destination of its rows, given the servers to start."""
    agents = {name: servers[name] for name in server.called_agents if name in servers}
    standing_in = stand_ins(servers)
    models = {
        name: {standing_in.get(name, model) if model == POLICY else model for model in policy_servers(agent)}
        for name, agent in agents.items()
    }
    policies, untrainable = frozenset({POLICY}), None
    if (trained := trained_agent(server, agents)) in models:
        policies |= models[trained]
    else:
        several = [name for name in agents if standing_in.get(name) in models[name]]
        policies |= {standing_in[name] for name in several}
        if several:
            untrainable = (
                f"environment server {server.name!r} has several agents with {POLICY}: {', '.join(several)}; set "
                f"{server.key}.{AGENT_SERVER} to the one to train"
            )
    callers = {model: [name for name in models if model in models[name]] for model in chain(*models.values())}
    bound = server.block.get("resources_server")
    return Destination(
        server.name,
        trained if trained in agents else server.name,
        "url",
        policies,
        owns_episode=True,
        callers={model: names[0] for model, names in callers.items() if len(names) == 1},
        stand_ins=frozenset(standing_in[name] for name in agents if name in standing_in),
        taskset=str((bound.get("name") if isinstance(bound, dict) else None) or server.name),
        untrainable=untrainable,
    )


def stand_ins(servers: Mapping[str, ServerInstance]) -> dict[str, str]:
    """Return a model server in place of the policy's for each agent that calls that and is not alone with it in its episodes,
    or does not stand for the policy in them.
    """
    shared: dict[str, str] = {}
    agents = {name: server for name, server in servers.items() if server.kind == AGENTS}
    for server in servers.values():
        if server.kind == ENVIRONMENT_SERVERS:
            calling = [
                name for name in server.called_agents if name in agents and _names_policy(agents[name])
            ]
            if len(calling) > 1 or calling not in ([], [trained_agent(server, agents)]):
                shared |= {name: f"{POLICY}_as_{name}" for name in calling}
    return shared


def _names_policy(agent: ServerInstance) -> bool:
    return any(kind == MODELS and name == POLICY for _, kind, name in references(agent.block))


def callers_of(config: Node, agent: str) -> list[str]:
    """Return the environment servers that call an agent, relays included, sorted."""
    owners = servers_of(config, ENVIRONMENT_SERVERS)
    return sorted(owner.name for owner in owners if agent in owner.called_agents)


def choose_server(
    config: Node, servers: Mapping[str, ServerInstance], name: str, taskset: str | None
) -> ServerInstance:
    """Return the agent or environment server that runs a row, given the name that the row has, or the default.

    Raises `ConfigError` for an agent that several environment servers call, and for a route to none.
    """
    owners = {server.name: server for server in servers_of(config, ENVIRONMENT_SERVERS)}
    routes = config.get(ROUTES)
    route = routes.get(taskset) if isinstance(routes, dict) and taskset is not None else None
    if name not in owners and route is not None:
        if route not in owners:
            raise ConfigError(
                f"{ROUTES} sends taskset {taskset!r} to {route!r}, which is no environment server"
            )
        name = str(route)
    if name not in owners:
        calling = callers_of(config, name)
        if len(calling) > 1:
            raise ConfigError(
                f"agent {name!r} is behind several environment servers: {', '.join(calling)}; give one as the agent "
                "(--agent), or in the row as _ng_environment_server"
            )
        name = calling[0] if calling else name
    owner = owners.get(name)
    if owner is not None and owner.is_relay:
        name = next(iter(owner.called_agents), name)
    if name not in servers:
        raise ConfigError(
            f"{name!r} is not among the servers that this environment starts: {', '.join(servers)}"
        )
    return servers[name]
