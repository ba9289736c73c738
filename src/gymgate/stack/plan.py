"""The parts of an environment, according to its resolved config, and how its servers are started."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymgate.catalog.needs import judge_references, refuse_unanswered
from gymgate.catalog.resolve import (
    AGENTS,
    Node,
    ServerInstance,
    interpolated,
    provider_in,
    sandbox_references,
    walk,
)
from gymgate.catalog.sandboxes import (
    DOCKER,
    LOCAL,
    choose_provider,
    packaged_providers,
    providers_of,
    refuse_undefined,
    sandbox_block,
    with_labels,
)
from gymgate.config import (
    SUPPORTED_NEMO_GYM,
    EnvironmentConfig,
    HTTPEndpoint,
    JudgeEndpoint,
    ReplayEndpoint,
    StackConfig,
)
from gymgate.errors import ConfigError, NeedMissingError
from gymgate.gateway.route import POLICY_AS_JUDGE
from gymgate.gateway.server import Gateway
from gymgate.runtime import Runtime, npm
from gymgate.runtime.cache import gym_cache
from gymgate.runtime.command import Progress
from gymgate.runtime.containers import ROLLOUT
from gymgate.runtime.sandboxes import usable_choices, why_unusable
from gymgate.stack import gym_config
from gymgate.stack.children import Child
from gymgate.stack.containers import Containers
from gymgate.stack.forkserver_client import ForkServerClient
from gymgate.stack.forkserver_pool import ForkServerPool
from gymgate.stack.ports import LOOPBACK
from gymgate.stack.routing import Strategy, refuse_unroutable
from gymgate.stack.workers import Workers, count_workers


@dataclass(frozen=True)
class EnvironmentPlan:
    """The parts of an environment."""

    config: dict[str, Any]
    servers: list[ServerInstance]
    directories: dict[str, Path]
    ray: frozenset[str]
    """Instances that need Ray."""
    urls: tuple[str, ...]
    """Config keys with the URL of a model that servers call by themselves. The gateway answers for each under that name."""
    agents: dict[str, str]
    """Agent instance -> implementation."""
    strategies: dict[str, Strategy]
    """Agent instance -> how the keys of its rollouts reach its model calls."""
    default_agent: str
    workers: Workers
    own_docker: bool = False
    """Whether the code of a server uses NeMo Gym's Docker provider where the config names no provider."""


@dataclass(frozen=True)
class EnvironmentContext:
    """What an environment shares with its stack."""

    config: StackConfig
    runtime: Runtime
    """The environment's own, whose requirements may differ from its siblings'."""
    fork_servers: ForkServerPool
    gateway: Gateway
    directory: Path
    """For logs."""
    progress: Progress
    containers: Containers

    async def fork_server(self) -> ForkServerClient:
        """Return the fork server of this runtime; a new one if the last has died."""
        return await self.fork_servers.client(self.runtime.python)


async def make_plan(
    spec: EnvironmentConfig, config_files: Sequence[Path], context: EnvironmentContext, logs: Path
) -> EnvironmentPlan:
    """Read an environment's config. Raises `ConfigError` and `NeedMissingError` for what it lacks."""
    fork_server = await context.fork_server()
    chosen = _chosen_sandbox(spec, context)
    answer = await fork_server.parse(
        spec.name,
        logs / "config.log",
        directory=str(_working_directory(context.directory)),
        **gym_config.parse_order(
            config_files,
            spec.overrides,
            context.directory / "results",
            gym_cache(),
            provider_in(chosen),
        ),
    )
    config = gym_config.checked_config(answer, spec.name)
    if chosen is not None:
        choose_provider(config, chosen)
    servers = gym_config.servers_to_start(config, spec.agent)
    await asyncio.to_thread(_require_sandbox, spec, config, servers, context)
    agents = {item.name: item.type for item in servers if item.kind == AGENTS}
    if not agents:
        raise ConfigError(f"environment {spec.name!r} has no agent in {config_files[0]}")
    urls = gym_config.model_urls(config)
    roots = gym_config.component_roots(config_files, context.config.component_roots, context.runtime.site)
    directories: dict[str, Path] = {}
    ray = set()
    own_docker = False

    def read_code() -> None:
        nonlocal own_docker
        for item in servers:
            directory = directories[item.name] = gym_config.directory_of(item, roots)
            if gym_config.uses_ray(directory, item.entrypoint):
                ray.add(item.name)
            own_docker = own_docker or gym_config.uses_own_docker(directory, item.block)

    await asyncio.to_thread(read_code)
    strategies = {
        item.name: gym_config.strategy_of(item, urls, config, context.runtime.version, spec.routing)
        for item in servers
        if item.kind == AGENTS
    }
    default = spec.agent or next(iter(agents))
    if strategies[default] == "none":
        raise refuse_unroutable(default, agents[default], context.runtime.version)
    own_process = {name for name, strategy in strategies.items() if strategy == "process"}
    workers = await asyncio.to_thread(
        count_workers, config, servers, directories, own_process, context.config.agent_processes
    )
    return EnvironmentPlan(
        config,
        servers,
        directories,
        frozenset(ray),
        urls,
        agents,
        strategies,
        default,
        workers,
        own_docker,
    )


def _chosen_sandbox(spec: EnvironmentConfig, context: EnvironmentContext) -> Node | None:
    """Return the settings of the sandbox provider that was chosen for an environment, if one was."""
    if spec.sandbox is None:
        return None
    block = sandbox_block(spec.sandbox, context.runtime.site)
    if spec.sandbox == LOCAL:  # NeMo Gym's settings name a directory below the server's working directory
        block[LOCAL]["workspace_root"] = str(context.directory / "sandboxes")
    return block


def _require_sandbox(
    spec: EnvironmentConfig, config: Node, servers: Sequence[ServerInstance], context: EnvironmentContext
) -> None:
    """Raise `NeedMissingError` if a server names a sandbox that nobody defines. Blocks while it looks for providers."""
    keys = {server.key for server in servers}
    used = tuple(
        each for each in sandbox_references(config) if any(each.setting.startswith(f"{key}.") for key in keys)
    )
    if any(each.provider is None for each in used):
        choices = usable_choices(packaged_providers(context.runtime.site))
        refuse_undefined(spec.name, used, choices)
    if spec.sandbox is not None and not used:
        context.progress(f"warning: {spec.name}: its config names no sandbox; {spec.sandbox!r} has no effect")
    elif spec.sandbox is not None:
        _refuse_unusable(spec.name, config, context)


def _refuse_unusable(environment: str, config: Node, context: EnvironmentContext) -> None:
    """Raise `NeedMissingError` for a provider whose program or daemon is not here. Blocks."""
    choices = packaged_providers(context.runtime.site)
    for name, settings in providers_of(config):
        if reason := why_unusable(name, settings, choices):
            raise NeedMissingError(
                f"environment {environment!r}: {reason}", environment=environment, need="sandbox"
            )


def require_judges(plan: EnvironmentPlan, environment: str, models: Mapping[str, JudgeEndpoint]) -> None:
    """Raise `NeedMissingError` for a judge or user simulator that a server is configured with and `models` leaves out.

    Many servers turn a judge's failure into a reward of 0.
    """
    refuse_unanswered(environment, judge_references(plan.servers), models)
    refuse_unanswered(environment, dict(_url_judges(plan)), with_address(models), keyless=True)


def with_address(models: Mapping[str, JudgeEndpoint]) -> dict[str, JudgeEndpoint]:
    """Return the endpoints that can serve calls without a rollout's key, and those that must serve none."""
    return {
        name: endpoint
        for name, endpoint in models.items()
        if endpoint == "none" or isinstance(endpoint, HTTPEndpoint | ReplayEndpoint)
    }


def judge_warnings(plan: EnvironmentPlan) -> Iterator[str]:
    """Yield a line for each judge whose URL is set in the config itself: its calls do not go through the gateway."""
    for item in plan.servers:
        for path, value in walk(item.block):
            leaf = path.rpartition(".")[2]
            is_url = leaf.startswith("judge") and leaf.endswith("url") and isinstance(value, str) and value
            if is_url and not interpolated(value) & {*plan.urls}:
                yield (
                    f"{path} of {item.name} is {value}: gymgate does not see these calls, and a failed one counts as "
                    "failed only if the environment says so"
                )


def _url_judges(plan: EnvironmentPlan) -> Iterator[tuple[str, str]]:
    """Yield the judges that servers call by a URL, each with the setting that holds it."""
    for item in plan.servers:
        own_process = plan.strategies.get(item.name) == "process"
        own = gym_config.policy_urls(item, plan.urls) if own_process else set()
        for path, value in walk(item.block):
            for key in interpolated(value) if isinstance(value, str) else ():
                if key in plan.urls and key not in own and "judge" in f"{path} {key}":
                    yield key, f"{path} of {item.name}"


def model_servers(plan: EnvironmentPlan) -> list[str]:
    """Return every model server that the gateway answers for."""
    own_judge = [POLICY_AS_JUDGE] if gym_config.is_own_judge(plan.config) else []
    return [*gym_config.model_servers(plan.config), *plan.urls, *own_judge]


def link_programs(plan: EnvironmentPlan, context: EnvironmentContext, logs: Path) -> None:
    """Link each agent's command, in the version of its settings. Blocks, for about 15 s where npm installs one."""
    for instance in plan.servers:
        if instance.name in plan.agents:
            directory = _commands(logs, instance)
            shutil.rmtree(directory, ignore_errors=True)  # an earlier stack's
            command = npm.ensure_agent_command(instance.type, instance.block, context.progress)
            if command is not None:
                directory.mkdir(parents=True)
                (directory / command.name).symlink_to(command)


def _commands(logs: Path, instance: ServerInstance) -> Path:
    """Return the directory that precedes an agent's PATH: two agents may run one command in different versions."""
    return logs / "commands" / gym_config.file_name(instance.name)


async def server_config(
    plan: EnvironmentPlan,
    context: EnvironmentContext,
    fork_server: ForkServerClient,
    ports: Mapping[str, int],
    port_for: Callable[[str], Awaitable[int]],
    labels: Mapping[str, str],
    policy_host: str = LOOPBACK,
) -> dict[str, Any]:
    """Return the config for servers at these ports. Their model servers are at the gateway's ports that `port_for` gives,
    their Docker containers get `labels`, and the policy is reached at `policy_host`."""
    models = {name: await port_for(name) for name in model_servers(plan)}
    ray = await fork_server.ray_address(context.progress) if plan.ray else None
    config = gym_config.with_ports(
        plan.config,
        ports,
        models,
        ray,
        policy_host=policy_host,
        # it names no rollout to resources servers; other releases may have another setting
        capture=not labels and context.runtime.version in SUPPORTED_NEMO_GYM,
    )
    return with_labels(config, labels) if labels else config


def policy_host(plan: EnvironmentPlan, context: EnvironmentContext) -> str:
    """Return the address at which an environment's agents reach the policy, as URLs have it.

    Sandboxes beyond loopback need the key in the URL, so agents that send it in the body, or not at all, stay on loopback.
    """
    by_url = all(strategy == "url" for strategy in plan.strategies.values())
    if context.config.gateway_host is not None and not by_url:
        context.progress(
            "warning: gateway_host has no effect: an agent does not put the rollout's key into its URL"
        )
    host = (context.config.gateway_host if by_url else None) or LOOPBACK
    return f"[{host}]" if ":" in host else host


async def container_labels(plan: EnvironmentPlan, context: EnvironmentContext) -> dict[str, str]:
    """Return labels for the Docker containers of servers that are about to start; empty if they start none."""
    return await asyncio.to_thread(context.containers.new_labels) if starts_containers(plan) else {}


def starts_containers(plan: EnvironmentPlan) -> bool:
    """Whether servers of an environment make their sandboxes with Docker."""
    return plan.own_docker or any(name == DOCKER for name, _ in providers_of(plan.config))


async def start_server(
    plan: EnvironmentPlan,
    fork_server: ForkServerClient,
    logs: Path,
    instance: ServerInstance,
    name: str,
    config: dict[str, Any],
    labels: Mapping[str, str],
) -> Child:
    """Start a server under a name, which its log has too; its containers get `labels`. It does not listen yet."""
    return await fork_server.serve(
        name,
        logs / f"{gym_config.file_name(name)}.log",
        directory=str(plan.directories[instance.name]),
        entrypoint=instance.entrypoint,
        instance=instance.name,
        config=config,
        ray=instance.name in plan.ray,
        commands=str(_commands(logs, instance)),
        labels=dict(labels),
        rollout_label=ROLLOUT,
    )


def _working_directory(fallback: Path) -> Path:
    """Return the daemon's working directory, which was the SDK process's; it may have been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return fallback
