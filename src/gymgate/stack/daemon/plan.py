"""What an environment starts and how its servers are connected, as far as its config and its servers' code decide it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from gymgate.core.config import (
    POLICY,
    EnvironmentConfig,
    HTTPEndpoint,
    JudgeEndpoint,
    ReplayEndpoint,
    StackConfig,
)
from gymgate.core.errors import ConfigError, NeedMissingError
from gymgate.core.http_client import LOOPBACK, url_host
from gymgate.gateway.route import POLICY_AS_JUDGE
from gymgate.gym.catalog.needs import (
    judge_references,
    judges_with_policy,
    refuse_unanswered,
)
from gymgate.gym.catalog.sandboxes import (
    DOCKER,
    packaged_providers,
    providers_of,
    refuse_undefined,
    with_labels,
)
from gymgate.gym.inside.resolve import (
    AGENTS,
    ENVIRONMENT_SERVERS,
    MODELS,
    NOWHERE,
    RESOURCES,
    Node,
    SandboxReference,
    ServerInstance,
    interpolated_keys,
    references,
    sandbox_references,
    servers_of,
    walk,
)
from gymgate.gym.runtime.sandbox_providers import usable_choices, why_unusable
from gymgate.gym.server_code import ServerCode, read_code
from gymgate.stack.daemon.destinations import (
    ROUTES,
    Destination,
    callers_of,
    choose_server,
    of_agent,
    of_environment_server,
    stand_ins,
)
from gymgate.stack.daemon.routing import Strategy, episode_error, strategy_for, unroutable_error
from gymgate.stack.workers import Workers, count_workers

_INSTALLED = "nemo_gym-*.dist-info"
"""Beside the code of an installed release; a checkout may have been changed."""
_SANDBOX_URL = "sandbox_model_base_url"
_OWN_SANDBOX_URL = frozenset({"harness_agent"})
"""Agents that, without this setting, give their sandbox the host's name in place of loopback. The others take the model
server's address, and `anyswe_agent` and `anyterminal_agent` leave out the rollout's key where the setting is there."""


@dataclass(frozen=True, eq=False)
class EnvironmentPlan:
    """What of an environment is known before any of its servers starts."""

    spec: EnvironmentConfig
    stack: StackConfig
    version: str
    """Of nemo-gym."""
    config: Node
    """The resolved config, with the sandbox provider that `spec` chooses."""
    code: Mapping[str, ServerCode]
    """By the names of the servers to start."""

    @classmethod
    def read(
        cls, spec: EnvironmentConfig, stack: StackConfig, version: str, config: Node, roots: Iterable[Path]
    ) -> Self:
        """Read the code of the servers that a config starts. Blocks. Raises `ConfigError` for what cannot be started."""
        roots = [*roots]
        code = {server.name: read_code(server, roots) for server in servers_to_start(config, spec.agent)}
        plan = cls(spec, stack, version, config, code)
        if not plan.agents:
            raise ConfigError(f"environment {spec.name!r} has no agent")
        if len(callers_of(config, plan.default_agent)) < 2:  # else rows have to choose
            plan.destination()
        return plan

    @cached_property
    def servers(self) -> dict[str, ServerInstance]:
        """The servers to start, by name, in the config's order."""
        return {server.name: server for server in servers_to_start(self.config, self.spec.agent)}

    @cached_property
    def agents(self) -> dict[str, str]:
        """Agent instance -> implementation."""
        return {server.name: server.type for server in self.servers.values() if server.kind == AGENTS}

    @property
    def default_agent(self) -> str:
        return self.spec.agent or next(iter(self.agents))

    @cached_property
    def row_targets(self) -> dict[str, str]:
        """The names that rows may have, of agents and environment servers, each with its implementation."""
        owners = servers_of(self.config, ENVIRONMENT_SERVERS)
        started = {*self.servers}
        names = {owner.name: owner.type for owner in owners if {owner.name, *owner.called_agents} & started}
        return self.agents | names

    @cached_property
    def tasksets(self) -> Collection[str]:
        """The materialised tasksets that are routed to an environment server."""
        routes = self.config.get(ROUTES)
        return {str(taskset) for taskset in routes} if isinstance(routes, dict) else ()

    @cached_property
    def packaged_graders(self) -> dict[str, str]:
        """Agent or environment server -> implementation of the resources server behind it, if an installed release has that."""
        behind = {
            name: self.servers.get(server.resources_server or "") for name, server in self.servers.items()
        }
        return {
            name: grader.type
            for name, grader in behind.items()
            if grader is not None and _is_installed(self.code[grader.name])
        }

    def untrainable(self, agent: str) -> str | None:
        """Return why the rollouts of an agent cannot be trained on, with the setting that would help; `None` if they can."""
        try:
            return self.destination(agent).untrainable
        except ConfigError:
            return None  # they cannot be run either

    def destination(self, name: str | None = None, taskset: str | None = None) -> Destination:
        """Return what runs a row that names this agent or environment server, or none, and is of this materialised taskset.

        Raises `ConfigError` if several environment servers could, or if the rollout's key would not reach its model calls.
        """
        key = (name or self.default_agent, taskset if taskset in self.tasksets else None)
        if key not in self._destinations:
            self._destinations[key] = self._destination(*key)
        return self._destinations[key]

    @cached_property
    def _destinations(self) -> dict[tuple[str, str | None], Destination]:
        return {}

    def _destination(self, name: str, taskset: str | None) -> Destination:
        server = choose_server(self.config, self.servers, name, taskset)
        if server.kind == AGENTS:
            return of_agent(server, self.strategy(server.name), self.stand_ins.get(server.name))
        for agent in server.called_agents:
            if agent in self.agents and (strategy := self.strategy(agent)) != "url":
                raise episode_error(server.name, agent, self.agents[agent], strategy)
        return of_environment_server(server, self.servers)

    @cached_property
    def workers(self) -> Workers:
        """The processes of each server."""
        own_process = {agent for agent, strategy in self.strategies.items() if strategy == "process"}
        return count_workers(self.config, self.code, own_process)

    @property
    def uses_ray(self) -> bool:
        return any(code.uses_ray for code in self.code.values())

    @cached_property
    def uses_docker(self) -> bool:
        """Whether its servers make containers with NeMo Gym's Docker provider."""
        is_chosen = any(name == DOCKER for name, _ in providers_of(self.config))
        return is_chosen or any(
            code.uses_docker and not self.servers[name].block.get("sandbox_provider")
            for name, code in self.code.items()
        )

    @cached_property
    def sandboxes(self) -> tuple[SandboxReference, ...]:
        """The settings with which its servers choose a sandbox provider."""
        keys = tuple(f"{server.key}." for server in self.servers.values())
        return tuple(item for item in sandbox_references(self.config) if item.setting.startswith(keys))

    @cached_property
    def urls(self) -> tuple[str, ...]:
        """Config keys with the URL of a model that servers call by themselves, without a model server."""
        servers = servers_of(self.config, RESOURCES, AGENTS, ENVIRONMENT_SERVERS)
        used = {key for server in servers for key in interpolated_keys(server.block)}
        return tuple(sorted(key for key in used if self.config.get(key) == NOWHERE))

    def policy_urls(self, agent: ServerInstance) -> set[str]:
        """Return the `urls` by which an agent without a model server reaches its policy."""
        if any(kind == MODELS for _, kind, _ in references(agent.block)):
            return set()
        return {key for key in interpolated_keys(agent.block) & {*self.urls} if "judge" not in key}

    @cached_property
    def strategies(self) -> dict[str, Strategy]:
        """Agent instance -> how the keys of its rollouts reach its model calls."""
        return {agent: self._strategy(self.servers[agent]) for agent in self.agents}

    def strategy(self, agent: str) -> Strategy:
        """Return an agent's strategy. Raises `ConfigError` if the keys of its rollouts cannot reach its model calls."""
        if (strategy := self.strategies[agent]) == "none":
            raise unroutable_error(agent, self.agents[agent], self.version)
        return strategy

    def _strategy(self, agent: ServerInstance) -> Strategy:
        has_reference = any(kind in (AGENTS, MODELS) for _, kind, _ in references(agent.block))
        own_urls = not has_reference and bool(self.policy_urls(agent))
        strategy = self.spec.routing or strategy_for(agent.type, self.version, own_urls=own_urls)
        if (
            strategy in ("url", "process")
            and not has_reference
            and not own_urls
            and self._has_foreign_url(agent)
        ):
            return "none"
        return strategy

    def _has_foreign_url(self, agent: ServerInstance) -> bool:
        """Whether an agent's config gives it a model by a fixed URL, which the gateway cannot stand in for."""
        urls = [
            str(value)
            for key, value in agent.block.items()
            if key.endswith("base_url") and "judge" not in key
        ]
        urls += [str(self.config.get(key)) for url in urls for key in interpolated_keys(url)]
        return any(url.startswith(("http://", "https://")) for url in urls)

    @cached_property
    def model_servers(self) -> tuple[str, ...]:
        """Every model server that the gateway answers for."""
        names = (server.name for server in _servers_to_start(self.config, MODELS))
        is_own_judge = any(judges_with_policy(server) for server in self.servers.values())
        own_judge = [POLICY_AS_JUDGE] if is_own_judge else []
        return (*names, *self.urls, *own_judge, *self.stand_ins.values())

    @cached_property
    def stand_ins(self) -> dict[str, str]:
        """Agent instance -> the model server that it has in place of the policy's, which it would share with another one."""
        return stand_ins(self.servers)

    @cached_property
    def judges(self) -> frozenset[str]:
        """The model servers other than the policy's."""
        return frozenset(self.model_servers) - {POLICY}

    @cached_property
    def holds_few_files(self) -> bool:
        """Whether its rollouts need only `FEW_FILES_PER_ROLLOUT` on lean servers: others were not measured."""
        is_released = all(map(_is_installed, self.code.values()))
        has_environment_server = any(server.kind == ENVIRONMENT_SERVERS for server in self.servers.values())
        is_simple = {*self.agents.values()} == {"simple_agent"} and not has_environment_server
        has_more = self.judges or self.uses_docker or self.uses_ray or self.config.get("telemetry")
        return is_released and is_simple and not has_more

    def require_judges(self) -> None:
        """Raise `NeedMissingError` for a judge or user simulator that a server is configured with and that has no endpoint.

        Many servers turn a judge's failure into a reward of 0.
        """
        models = dict(self.stack.models)
        refuse_unanswered(self.spec.name, judge_references([*self.servers.values()]), models)
        by_url = {key: f"{path} of {server.name}" for server, path, key in self._judge_urls()}
        refuse_unanswered(self.spec.name, by_url, keyless_endpoints(models), keyless=True)

    def _judge_urls(self) -> Iterator[tuple[ServerInstance, str, str]]:
        """Yield the settings by which a server calls a judge at a URL of the gateway: the server, the setting, the key."""
        for server in self.servers.values():
            own = self.policy_urls(server) if self.strategies.get(server.name) == "process" else set()
            for path, value in walk(server.block):
                for key in interpolated_keys(value) if isinstance(value, str) else ():
                    if key in self.urls and key not in own and "judge" in f"{path} {key}":
                        yield server, path, key

    def warnings(self) -> Iterator[str]:
        """Yield a line for each setting that does not do what one may think."""
        if self.spec.sandbox is not None and not self.sandboxes:
            yield f"its config has no sandbox; {self.spec.sandbox!r} has no effect"
        for server in self.servers.values():
            for path, value in walk(server.block):
                leaf = path.rpartition(".")[2]
                is_url = (
                    leaf.startswith("judge") and leaf.endswith("url") and isinstance(value, str) and value
                )
                if is_url and not interpolated_keys(value) & {*self.urls}:
                    yield (
                        f"{path} of {server.name} is {value}: gymgate does not see these calls, and a failed one counts "
                        "as failed only if the environment says so"
                    )
        yield from self.workers.warnings
        if self.stack.gateway_host is not None and not self._keys_in_urls:
            yield "gateway_host has no effect: an agent does not put the rollout's key into its URL"

    @property
    def _keys_in_urls(self) -> bool:
        return all(strategy == "url" for strategy in self.strategies.values())

    @property
    def policy_host(self) -> str:
        """The address at which the agents reach the policy, as URLs have it.

        Sandboxes beyond loopback need the key in the URL, so agents that send it in the body, or not at all, stay on loopback.
        """
        return url_host((self.stack.gateway_host if self._keys_in_urls else None) or LOOPBACK)

    def server_config(
        self,
        ports: Mapping[str, int],
        gateway: Mapping[str, int],
        *,
        ray: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Node:
        """Return the config that servers get: without relays, with models on the gateway and our ports.

        `ports` are those of the servers to start, `gateway` those of `model_servers`. `ray` is the address of a Ray;
        Docker containers get `labels`.
        """
        result = {
            name: f"http://{LOOPBACK}:{gateway[name]}/v1" if value == NOWHERE and name in gateway else value
            for name, value in self.config.items()
            if not (isinstance(value, dict) and ENVIRONMENT_SERVERS in value)
        }
        for server in _servers_to_start(self.config):
            if server.kind == MODELS:
                host = self.policy_host if server.name == POLICY else LOOPBACK
                result[server.name] = _address(server, gateway[server.name], host=host)
                if server.name == POLICY:
                    if POLICY_AS_JUDGE in gateway:
                        result[POLICY_AS_JUDGE] = _address(server, gateway[POLICY_AS_JUDGE])
                    for name in self.stand_ins.values():
                        result[name] = _address(server, gateway[name], host=host)
            elif server.name in ports:
                settings = {}
                if server.type in _OWN_SANDBOX_URL and not server.block.get(_SANDBOX_URL):
                    settings[_SANDBOX_URL] = f"http://{self.policy_host}:{gateway[POLICY]}"
                placed = _address(server, ports[server.name], **settings)
                if server.name in self.stand_ins:
                    placed = _with_policy(placed, self.stand_ins[server.name])
                elif judges_with_policy(server):
                    placed = _with_policy(placed, POLICY_AS_JUDGE)
                result[server.name] = placed
        if ray is not None:
            result["ray_head_node_address"] = ray
        return with_labels(result, labels) if labels else result


def _is_installed(code: ServerCode) -> bool:
    """Whether it is a server's of an installed release."""
    return any(code.directory.parent.parent.glob(_INSTALLED))


def keyless_endpoints(models: Mapping[str, JudgeEndpoint]) -> dict[str, JudgeEndpoint]:
    """Return the endpoints that can serve calls without a rollout's key, and those that must serve none."""
    return {
        name: endpoint
        for name, endpoint in models.items()
        if endpoint == "none" or isinstance(endpoint, HTTPEndpoint | ReplayEndpoint)
    }


def servers_to_start(config: Node, agent: str | None) -> list[ServerInstance]:
    """Return all resources servers, and all agents and environment servers or, with the name of one, this one, those that it
    refers to, and the environment servers in front of these. Relays are left out.
    """
    kinds = (AGENTS, RESOURCES, ENVIRONMENT_SERVERS)
    servers = {server.name: server for server in _servers_to_start(config, *kinds) if not server.is_relay}
    if agent is None:
        return [*servers.values()]
    choices = sorted(server.name for server in servers.values() if server.kind != RESOURCES)
    if agent not in choices:
        raise ConfigError(f"there is no agent {agent!r}; the config has {', '.join(choices) or 'none'}")
    names = [agent]
    for name in names:  # which grows meanwhile
        related = {server.name for server in servers.values() if name in server.called_agents}
        related |= {other for _, _, other in references(servers[name].block)} if name in servers else set()
        names += sorted(related - {*names})
    return [server for server in servers.values() if server.kind == RESOURCES or server.name in names]


def _servers_to_start(config: Node, *kinds: str) -> list[ServerInstance]:
    """Return the servers of these kinds, or of every kind, that NeMo Gym would start, in the config's order."""
    return [server for server in servers_of(config, *kinds) if server.entrypoint]


def _address(server: ServerInstance, port: int, *, host: str = LOOPBACK, **settings: Any) -> Node:
    """Return a server's entry in the config with its address; a model server, which nobody starts, without entrypoint."""
    block = {**server.block, **settings, "host": host, "port": port}
    if server.kind == MODELS:
        del block["entrypoint"]
    if "num_workers" in block:
        block["num_workers"] = 1  # each of its processes is a server with one
    return {server.kind: {server.type: block}}


def _with_policy(node: Any, stand_in: str) -> Any:
    """Return a block in which references to the policy's model server name one that stands in for it."""
    if isinstance(node, dict):
        if node.get("type") == MODELS and node.get("name") == POLICY:
            return {**node, "name": stand_in}
        return {key: _with_policy(child, stand_in) for key, child in node.items()}
    return [_with_policy(child, stand_in) for child in node] if isinstance(node, list) else node


def require_sandboxes(plan: EnvironmentPlan, site: Path) -> None:
    """Raise `NeedMissingError` for a sandbox that no config defines, or whose program or daemon is not here. Blocks."""
    name, packaged = plan.spec.name, packaged_providers(site)
    if any(reference.provider is None for reference in plan.sandboxes):
        refuse_undefined(name, plan.sandboxes, usable_choices(packaged))
    if plan.spec.sandbox is not None and plan.sandboxes:
        for provider, settings in providers_of(plan.config):
            if reason := why_unusable(provider, settings, packaged):
                raise NeedMissingError(
                    f"environment {name!r}: {reason}", environment=name, need="sandbox", kind="docker"
                )
