"""What an environment consists of, as its resolved config says, and what its servers are started with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gymgate.catalog import ServerInstance
from gymgate.catalog.agentcode import read_agent
from gymgate.catalog.needs import judge_references, refuse_unanswered, walk
from gymgate.config import EnvironmentConfig, HTTPEndpoint, JudgeEndpoint, ReplayEndpoint
from gymgate.errors import ConfigError
from gymgate.gateway import Gateway
from gymgate.gateway.route import POLICY_AS_JUDGE
from gymgate.runtime import npm
from gymgate.stack import forkserver, gym_config
from gymgate.stack.forkserver_client import Child, ForkServerClient
from gymgate.stack.gym_config import AGENTS, Instance
from gymgate.stack.routing import Handing, Strategy, refuse_unroutable


@dataclass(frozen=True)
class Plan:
    """What an environment consists of."""

    config: dict[str, Any]
    servers: list[Instance]
    directories: dict[str, Path]
    ray: frozenset[str]
    """Instances that need Ray."""
    urls: tuple[str, ...]
    """Keys of models that servers call by themselves; the gateway stands in for each by that name."""
    agents: dict[str, str]
    """Agent instance -> implementation."""
    strategies: dict[str, Strategy]
    """Agent instance -> how its rollouts' keys reach their model calls."""
    default_agent: str | None
    handing: Handing
    """What this release's base classes do with a rollout's key."""


@dataclass(frozen=True)
class Host:
    """What an environment gets from its stack."""

    spawner: Callable[[], Awaitable[ForkServerClient]]
    """The fork server, a new one if the last has died."""
    ray_address: Callable[[ForkServerClient], Awaitable[str]]
    gateway: Gateway
    version: str
    site: Path
    component_roots: tuple[str, ...]
    directory: Path
    """For logs."""
    cache_dir: Path
    programs: Path
    """A directory on the servers' PATH."""
    start_timeout_s: float
    max_restarts: int
    restart_window_s: float
    agent_processes: int
    progress: Callable[[str], None]
    models: Mapping[str, JudgeEndpoint] = field(default_factory=dict)
    """Endpoints of the model servers other than the policy's, by instance name; `"*"`: all."""


async def make_plan(spec: EnvironmentConfig, config_path: Path, host: Host, logs: Path) -> Plan:
    """Read an environment's config. Raises `ConfigError` and `NeedMissingError` for what it lacks."""
    spawner = await host.spawner()
    answer = await spawner.parse(
        spec.name,
        logs / "config.log",
        directory=str(_working_directory(host.directory)),
        config_paths=[str(config_path)],
        initial=gym_config.initial_config(host.directory / "results", host.cache_dir),
        overrides=[list(pair) for pair in spec.overrides],
        handing=gym_config.handing_order(),
    )
    config = gym_config.checked_config(answer, spec.name)
    wanted = gym_config.servers_to_start(config, spec.agent)
    agents = [item for item in wanted if item.kind == AGENTS]
    if not agents:
        raise ConfigError(f"environment {spec.name!r} has no agent in {config_path}")
    urls = tuple(answer.get("urls", ()))
    roots = gym_config.component_roots(config_path, host.component_roots, host.site)
    handing = Handing(**{**answer["handing"], "switches": tuple(answer["handing"]["switches"])})
    directories, ray, strategies = await asyncio.to_thread(_read_code, wanted, roots, urls, handing, config)
    default = gym_config.default_agent(config, spec.agent)
    types = {item.name: item.type for item in agents}
    if default is not None and strategies.get(default) == "none":
        raise refuse_unroutable(default, types[default], host.version)
    return Plan(
        config,
        wanted,
        directories,
        ray,
        urls,
        agents=types,
        strategies=strategies,
        default_agent=default,
        handing=handing,
    )


def _read_code(
    wanted: list[Instance],
    roots: list[Path],
    urls: Collection[str],
    handing: Handing,
    config: Mapping[str, Any],
) -> tuple[dict[str, Path], frozenset[str], dict[str, Strategy]]:
    """Each server's directory, those that need Ray, and how each agent is routed. Blocking: it reads their source."""
    directories = {item.name: gym_config.directory_of(item, roots) for item in wanted}
    ray = {item.name for item in wanted if gym_config.uses_ray(directories[item.name], item.entrypoint)}
    strategies = {
        item.name: gym_config.strategy_of(
            item, urls, handing, read_agent(roots, directories[item.name], item.entrypoint), config
        )
        for item in wanted
        if item.kind == AGENTS
    }
    return directories, frozenset(ray), strategies


def require_judges(plan: Plan, environment: str, models: Mapping[str, JudgeEndpoint]) -> None:
    """Raise `NeedMissingError` for a judge or user simulator that a server is configured with and `models` leaves out:
    many servers make a reward of 0 of a judge's failure."""
    refuse_unanswered(environment, judges_of(plan), models)
    refuse_unanswered(environment, dict(_url_judges(plan)), with_address(models), keyless=True)


def with_address(models: Mapping[str, JudgeEndpoint]) -> dict[str, JudgeEndpoint]:
    """Those that can serve calls without a rollout's key, and those that are to serve none."""
    return {
        name: endpoint
        for name, endpoint in models.items()
        if endpoint == "none" or isinstance(endpoint, HTTPEndpoint | ReplayEndpoint)
    }


def judges_of(plan: Plan) -> dict[str, str]:
    """Model servers that the environment's servers name beside the policy's, each with where."""
    servers = [ServerInstance(item.name, item.kind, item.type, item.entrypoint) for item in plan.servers]
    return judge_references(plan.config, servers)


def judge_warnings(plan: Plan) -> Iterator[str]:
    """A line for each judge whose address is set in the config itself: its calls do not come to the gateway."""
    for item in plan.servers:
        for path, value in walk(item.block):
            leaf = path.rpartition(".")[2]
            is_url = leaf.startswith("judge") and leaf.endswith("url") and isinstance(value, str) and value
            if is_url and not forkserver.interpolated(value) & {*plan.urls}:
                yield (
                    f"{path} of {item.name} is {value}: gymgate does not see these calls, and a failed one counts as one "
                    "only where the environment says so"
                )


def _url_judges(plan: Plan) -> Iterator[tuple[str, str]]:
    """Judges that servers call by a URL, each with where it is given to them."""
    for item in plan.servers:
        own = (
            gym_config.policy_urls(item, plan.urls) if plan.strategies.get(item.name) == "process" else set()
        )
        for path, value in walk(item.block):
            for key in forkserver.interpolated(value) if isinstance(value, str) else ():
                if key in plan.urls and key not in own and "judge" in f"{path} {key}":
                    yield key, f"{path} of {item.name}"


def model_servers(plan: Plan) -> list[str]:
    """Every model server that the gateway stands in for."""
    own_judge = [POLICY_AS_JUDGE] if gym_config.is_own_judge(plan.config) else []
    return [*gym_config.model_servers(plan.config), *plan.urls, *own_judge]


def link_programs(plan: Plan, host: Host) -> None:
    """Put the commands that agents run where their servers find them; blocking, some 15 s where npm installs one."""
    for instance in plan.servers:
        if instance.name in plan.agents:
            command = npm.ensure_program(instance.type, instance.block, host.progress)
            if command is not None:
                with contextlib.suppress(FileExistsError):
                    (host.programs / command.name).symlink_to(command)


async def configured(
    plan: Plan,
    host: Host,
    spawner: ForkServerClient,
    ports: Mapping[str, int],
    port_for: Callable[[str], Awaitable[int]],
) -> dict[str, Any]:
    """The config for servers at these ports, whose model servers are at the gateway's ports that `port_for` gives."""
    models = {name: await port_for(name) for name in model_servers(plan)}
    ray = await host.ray_address(spawner) if plan.ray else None
    return gym_config.placed(plan.config, ports, models, ray, capture="capture" in plan.handing.switches)


async def serve(
    plan: Plan, spawner: ForkServerClient, logs: Path, instance: Instance, name: str, config: dict[str, Any]
) -> Child:
    """Start a server under a name, which its log has too; it does not listen yet."""
    return await spawner.serve(
        name,
        logs / f"{gym_config.file_name(name)}.log",
        directory=str(plan.directories[instance.name]),
        entrypoint=instance.entrypoint,
        instance=instance.name,
        config=config,
        ray=instance.name in plan.ray,
    )


def _working_directory(fallback: Path) -> Path:
    """The daemon's, which was that of the SDK process; it may have been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return fallback
