"""What NeMo Gym's parser is asked about an environment's config, and what its answer means for the servers.

The parser runs in a child of the fork server; see `catalog.resolve`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gymgate.catalog import resolve
from gymgate.catalog.resolve import (
    AGENTS,
    MODELS,
    NOWHERE,
    RELAYS,
    RESOURCES,
    Node,
    ServerInstance,
    interpolated,
    references,
    servers_of,
)
from gymgate.catalog.scan import roots_around
from gymgate.config import POLICY, Routing
from gymgate.errors import ConfigError, NeedMissingError
from gymgate.gateway.route import POLICY_AS_JUDGE
from gymgate.stack.ports import LOOPBACK
from gymgate.stack.routing import Strategy, strategy_for

_USES_RAY = re.compile(
    r"^\s*(?:import ray|from ray\b)|\bray\.(?:remote|get|init|wait)\(|@ray\.remote", re.MULTILINE
)
_NO_VARIABLE = re.compile(r"Environment variable '(?P<name>\w+)' not found")
_NO_RAY = re.compile(r"^\s+ray_enabled(?:\s*:.*)?\s*=\s*False", re.MULTILINE)

_OBSERVABILITY = {"observability_enabled": True}
_CAPTURE = {"enabled": True, "all_agents": True}
_TRACING = frozenset({"simple_agent"})
"""Agents that record each rollout a second time while `observability_enabled` is on, and never use that record."""

_SANDBOX_URL = "sandbox_model_base_url"
_OWN_SANDBOX_URL = frozenset({"harness_agent"})
"""Agents that, without this setting, give their sandbox the host's name in place of loopback. The others take the model
server's address, and `anyswe_agent` and `anyterminal_agent` leave out the rollout's key where the setting is there."""

_FOREIGN = frozenset({"tests", "site-packages", "dist-packages", "node_modules", "__pycache__"})
"""Names of directories beside a server's code that hold other code."""


def parse_order(
    config_files: Iterable[Path],
    overrides: Iterable[tuple[str, Any]],
    results_dir: Path,
    cache_dir: Path,
    sandbox: str | None = None,
) -> dict[str, Any]:
    """Return the order for `catalog.resolve.resolve`: config files, overrides and a policy that is never called.

    `sandbox` is the provider that `catalog.sandboxes.choose_provider` is going to put in.
    """
    initial = {
        "policy_base_url": NOWHERE,
        "policy_api_key": "gymgate",
        "policy_model_name": "policy",
        "head_server": {"host": LOOPBACK, "port": 1},
        "default_host": LOOPBACK,
        # 0: unlimited. An agent calls itself once per rollout, and NeMo Gym allows 1,024 connections to one host.
        "global_aiohttp_connector_limit_per_host": 0,
        **_OBSERVABILITY,
        "allow_unsupported_pairing": True,
        "results_dir": str(results_dir),
        "cache_dir": str(cache_dir),
    }
    return {
        "parser": str(Path(resolve.__file__)),
        "policy": POLICY,
        "config_paths": [str(path) for path in config_files],
        "sandbox": sandbox,
        "overrides": [list(pair) for pair in overrides],
        "initial": initial,
    }


def checked_config(answer: Mapping[str, Any], environment: str) -> dict[str, Any]:
    """Return the resolved config in the parser's answer.

    Raises `NeedMissingError` naming the keys that the user must give, `ConfigError` for anything else that
    Gym's parser objects to.
    """
    if missing := answer.get("missing"):
        keys = ", ".join(missing)
        raise NeedMissingError(
            f"environment {environment!r} needs a value for {keys}; give it with "
            f"--set {missing[0]}=VALUE, or in Python as "
            f'EnvironmentConfig(name={environment!r}, overrides=(("{missing[0]}", ...),))',
            environment=environment,
            need=keys,
        )
    if unknown := answer.get("unknown"):
        raise ConfigError(f"environment {environment!r}: {unknown}")
    if error := answer.get("error"):
        raise ConfigError(
            f"NeMo Gym cannot read the config of {environment!r}: {' '.join(str(error).split())}{_hint(str(error))}"
        )
    config: dict[str, Any] = answer["config"]
    return config


def _hint(error: str) -> str:
    """Return advice if the error is about an environment variable: servers see only those that are named."""
    if (found := _NO_VARIABLE.search(error)) is None:
        return ""
    name = found["name"]
    return (
        f"; set {name} and name it with --env-var {name}, or in Python as StackConfig(env_vars=({name!r},))"
    )


def instances(config: Mapping[str, Any], *kinds: str) -> list[ServerInstance]:
    """Return the servers of these kinds, or of every kind, that a resolved config starts, in its order."""
    return [server for server in servers_of(config, *kinds) if server.entrypoint]


def model_servers(config: Mapping[str, Any]) -> list[str]:
    """Return the model servers that the gateway stands in for."""
    return [server.name for server in instances(config, MODELS)]


def model_urls(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of model URLs that resources servers and agents use directly, without a model server."""
    used = {key for server in servers_of(config, RESOURCES, AGENTS) for key in interpolated(server.block)}
    return tuple(sorted(key for key in used if config.get(key) == NOWHERE))


def is_own_judge(config: Mapping[str, Any]) -> bool:
    """Whether a resources server refers to the policy's model server."""
    return any(POLICY in _named(server.block) for server in instances(config, RESOURCES))


def only_agents_call_models(config: Mapping[str, Any]) -> bool:
    """Whether every model call is an agent's call of its policy, by an agent that needs no record of its own."""
    agents = {agent.type for agent in instances(config, AGENTS)}
    return agents <= _TRACING and {*model_servers(config)} <= {POLICY} and not is_own_judge(config)


def strategy_of(
    agent: ServerInstance,
    urls: Collection[str],
    config: Mapping[str, Any],
    version: str,
    routing: Routing | None = None,
) -> Strategy:
    """Return how to route an agent of a config in a release of nemo-gym.

    `urls` are the keys of model URLs that servers use directly. `routing` is the user's choice.
    """
    if not {AGENTS, MODELS}.isdisjoint(kind for _, kind, _ in references(agent.block)):
        return routing or strategy_for(agent.type, version)
    own = bool(policy_urls(agent, urls))
    strategy = routing or strategy_for(agent.type, version, own_urls=own)
    elsewhere = strategy in ("url", "process") and not own and _has_foreign_url(agent.block, config)
    return "none" if elsewhere else strategy


def _has_foreign_url(block: Node, config: Mapping[str, Any]) -> bool:
    """Whether an agent's config gives it a model by a fixed URL, which the gateway cannot stand in for."""
    values = [str(value) for key, value in block.items() if key.endswith("base_url") and "judge" not in key]
    values += [str(config.get(key)) for value in values for key in interpolated(value)]
    return any(value.startswith(("http://", "https://")) for value in values)


def policy_urls(agent: ServerInstance, urls: Collection[str]) -> set[str]:
    """Return those of the keys `urls` by which an agent without a model server reaches its policy."""
    if any(kind == MODELS for _, kind, _ in references(agent.block)):
        return set()
    return {key for key in interpolated(agent.block) & {*urls} if "judge" not in key}


def servers_to_start(config: Mapping[str, Any], agent: str | None) -> list[ServerInstance]:
    """Return all resources servers, and all agents or, with `agent`, this agent and those that it refers to."""
    found = {server.name: server for server in instances(config, AGENTS, RESOURCES)}
    if agent is None:
        return list(found.values())
    agents = sorted(server.name for server in found.values() if server.kind == AGENTS)
    if agent not in agents:
        raise ConfigError(f"there is no agent {agent!r}; the config has {', '.join(agents) or 'none'}")
    wanted = [agent]
    for name in wanted:
        named = _named(found[name].block) if name in found else set()
        wanted += sorted(named - {*wanted})
    return [server for server in found.values() if server.kind == RESOURCES or server.name in wanted]


def _named(node: Any) -> set[str]:
    """Return the names of servers that a value refers to."""
    return {name for _, _, name in references(node)}


def with_ports(
    config: Mapping[str, Any],
    ports: Mapping[str, int],
    gateway: Mapping[str, int],
    ray: str | None = None,
    *,
    policy_host: str = LOOPBACK,
    capture: bool = False,
) -> dict[str, Any]:
    """Return the config that servers get: without environment servers, with models on the gateway and our ports.

    `ports` are those of the servers to start, `gateway` those that stand in for model servers, by instance, and
    for models that a server reaches by a URL of its own (`judge_base_url`), by that key. `policy_host` is where agents reach
    the policy. `capture`: in this release
    `token_id_capture` puts a rollout's key into URLs as `observability_enabled` does.
    """
    result: dict[str, Any] = {}
    for name, value in config.items():
        if value == NOWHERE and name in gateway:
            result[name] = f"http://{LOOPBACK}:{gateway[name]}/v1"
        elif not (isinstance(value, dict) and RELAYS in value):
            result[name] = value
    for server in instances(config):
        if server.kind == MODELS:
            if server.name == POLICY and POLICY_AS_JUDGE in gateway:
                result[POLICY_AS_JUDGE] = _moved(server, gateway[POLICY_AS_JUDGE], entrypoint=False)
            host = policy_host if server.name == POLICY else LOOPBACK
            result[server.name] = _moved(server, gateway[server.name], entrypoint=False, host=host)
        elif server.name in ports:
            result[server.name] = _moved(server, ports[server.name], entrypoint=True)
            if server.type in _OWN_SANDBOX_URL and POLICY in gateway:
                block = result[server.name][server.kind][server.type]
                block[_SANDBOX_URL] = block.get(_SANDBOX_URL) or f"http://{policy_host}:{gateway[POLICY]}"
            if server.kind == RESOURCES and POLICY_AS_JUDGE in gateway:
                result[server.name] = _judged_by_policy(result[server.name])
    if ray is not None:
        result["ray_head_node_address"] = ray
    if capture and only_agents_call_models(config):
        # The rollout's key is in the URL by either; this one spares the agent its record (a fifth of its time).
        block = {**(config.get("token_id_capture") or {}), **_CAPTURE}
        result |= {"observability_enabled": False, "token_id_capture": block}
    return result


def _judged_by_policy(node: Any) -> Any:
    """Return a block in which references to the policy's model server name its stand-in for judges."""
    if isinstance(node, dict):
        if node.get("type") == MODELS and node.get("name") == POLICY:
            return {**node, "name": POLICY_AS_JUDGE}
        return {key: _judged_by_policy(child) for key, child in node.items()}
    return [_judged_by_policy(child) for child in node] if isinstance(node, list) else node


def _moved(server: ServerInstance, port: int, *, entrypoint: bool, host: str = LOOPBACK) -> Node:
    block = {key: value for key, value in server.block.items() if entrypoint or key != "entrypoint"}
    if "num_workers" in block:
        block["num_workers"] = 1  # each of its processes is a server with one
    return {server.kind: {server.type: {**block, "host": host, "port": port}}}


def directory_of(server: ServerInstance, roots: list[Path]) -> Path:
    """Return the directory of a server's code, under the first root that has it."""
    for root in roots:
        directory = root / server.kind / server.type
        if (directory / server.entrypoint).exists():
            return directory
    searched = ", ".join(str(root) for root in roots)
    raise ConfigError(
        f"the code of server {server.name!r}, {server.kind}/{server.type}/{server.entrypoint}, is not in {searched}; "
        f"add the directory that holds {server.kind}/ to component_roots"
    )


def component_roots(config_files: Iterable[Path], named: tuple[str, ...], site: Path) -> list[Path]:
    """Return where servers are looked for: the user's roots, the trees around the config files, the installed nemo-gym."""
    around = (root for path in config_files for root in roots_around(path, (AGENTS, RESOURCES)))
    return [
        *(Path(root).expanduser().absolute() for root in named),
        *dict.fromkeys(around),
        site,
    ]


def uses_ray(directory: Path, entrypoint: str) -> bool:
    """Whether a server's own code calls Ray. Blocking: it reads the source.

    Gym's base classes import Ray too, which no server needs. From 0.7 on a server can declare `ray_enabled = False`.
    """
    if _NO_RAY.search((directory / entrypoint).read_text(errors="replace")):
        return False
    return any(_USES_RAY.search(path.read_text(errors="replace")) for path in own_modules(directory))


def uses_own_docker(directory: Path, block: Node) -> bool:
    """Whether a server's code makes containers with NeMo Gym's Docker provider although its config names none. Blocking."""
    if block.get("sandbox_provider"):
        return False
    return any("DockerProvider(" in path.read_text(errors="replace") for path in own_modules(directory))


def own_modules(directory: Path) -> Iterator[Path]:
    """Yield the Python files of a server's own code, without tests, virtual environments, installed packages and caches."""
    for parent, children, files in os.walk(directory):
        own = (name for name in children if name not in _FOREIGN and not name.startswith("."))
        children[:] = [name for name in own if not Path(parent, name, "pyvenv.cfg").exists()]
        yield from (Path(parent, name) for name in files if name.endswith(".py"))


def file_name(name: str) -> str:
    """Return a name in a form that can be part of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "_"
