"""From an environment's config to the servers that it needs: what goes into Gym's parser and what comes of it.

Pure functions over plain dicts; the parsing itself happens in a child of the fork server.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymgate.catalog.agentcode import AgentCode
from gymgate.config import POLICY
from gymgate.errors import ConfigError, NeedMissingError
from gymgate.gateway.route import POLICY_AS_JUDGE
from gymgate.stack import forkserver
from gymgate.stack.ports import LOOPBACK
from gymgate.stack.routing import BY_URL, Handing, Strategy, strategy_for, url_entries

AGENTS, RESOURCES, MODELS = "responses_api_agents", "resources_servers", "responses_api_models"
RELAYS = "environment_servers"
KINDS = (AGENTS, RESOURCES, MODELS, RELAYS)
_USES_RAY = re.compile(
    r"^\s*(?:import ray|from ray\b)|\bray\.(?:remote|get|init|wait)\(|@ray\.remote", re.MULTILINE
)
_NO_VARIABLE = re.compile(r"Environment variable '(?P<name>\w+)' not found")
_NO_RAY = re.compile(r"^\s+ray_enabled(?:\s*:.*)?\s*=\s*False", re.MULTILINE)

_OBSERVABILITY = {"observability_enabled": True}
_CAPTURE = {"enabled": True, "all_agents": True}
_KEY = "0" * 32
_TRACING = frozenset({"simple_agent"})
"""Agents that make a second record of each rollout while `observability_enabled` is on, and need it for nothing."""

_FOREIGN = frozenset({"tests", "site-packages", "dist-packages", "node_modules", "__pycache__"})
"""Directories beside a server's code that hold none of it."""
_OWN_MODEL = ("model_server", "policy_model_server")
"""Keys of an agent's block that name its own model, where others name judges and user simulators."""

Block = dict[str, Any]


@dataclass(frozen=True)
class Instance:
    """One server that a resolved config names."""

    name: str
    kind: str
    type: str
    """Name of its implementation's directory."""
    block: Block

    @property
    def entrypoint(self) -> str:
        return str(self.block["entrypoint"])


def initial_config(results_dir: Path, cache_dir: Path) -> dict[str, Any]:
    """What every environment is parsed with: a policy that is never called there, and the rollout's URL on."""
    return {
        "policy_base_url": forkserver.NOWHERE,
        "policy_api_key": "gymgate",
        "policy_model_name": "policy",
        "head_server": {"host": LOOPBACK, "port": 1},
        "default_host": LOOPBACK,
        # Unlimited. An agent calls itself once per rollout, so that Gym's 1,024 per host would hold the others up, unsaid.
        "global_aiohttp_connector_limit_per_host": 0,
        **_OBSERVABILITY,
        "allow_unsupported_pairing": True,
        "results_dir": str(results_dir),
        "cache_dir": str(cache_dir),
    }


def handing_order() -> dict[str, Any]:
    """What to ask the release's base classes of how they hand keys on; see `forkserver.handing`."""
    return {
        "key": _KEY,
        "bodies": {by: url_entries(by, _KEY) for by in BY_URL},
        "switches": {
            "observability": _OBSERVABILITY,
            "capture": {"observability_enabled": False, "token_id_capture": _CAPTURE},
        },
    }


def checked_config(answer: Mapping[str, Any], environment: str) -> dict[str, Any]:
    """The resolved config in the parser's answer.

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
    if error := answer.get("error"):
        raise ConfigError(
            f"NeMo Gym cannot read the config of {environment!r}: {' '.join(str(error).split())}{_hint(str(error))}"
        )
    config: dict[str, Any] = answer["config"]
    return config


def _hint(error: str) -> str:
    """What to do about a variable that the config reads: servers see only those that are named."""
    if (found := _NO_VARIABLE.search(error)) is None:
        return ""
    name = found["name"]
    return (
        f"; set {name} and name it with --env-var {name}, or in Python as StackConfig(env_vars=({name!r},))"
    )


def instances(config: Mapping[str, Any]) -> Iterator[Instance]:
    """Every server of a resolved config, in its order."""
    for name, block in config.items():
        if not isinstance(block, dict):
            continue
        for kind in KINDS:
            for type_, inner in (block.get(kind) or {}).items():
                if isinstance(inner, dict) and "entrypoint" in inner:
                    yield Instance(str(name), kind, str(type_), inner)


def model_servers(config: Mapping[str, Any]) -> list[str]:
    """Instances that the gateway stands in for."""
    return [instance.name for instance in instances(config) if instance.kind == MODELS]


def is_own_judge(config: Mapping[str, Any]) -> bool:
    """Whether a resources server refers to the policy's model server."""
    return any(POLICY in _references(each.block) for each in instances(config) if each.kind == RESOURCES)


def only_agents_call_models(config: Mapping[str, Any]) -> bool:
    """Whether every model call is an agent's own call of the policy, by an agent that needs only its own URL."""
    agents = {instance.type for instance in instances(config) if instance.kind == AGENTS}
    return agents <= _TRACING and {*model_servers(config)} <= {POLICY} and not is_own_judge(config)


def strategy_of(
    agent: Instance, urls: Collection[str], handing: Handing, code: AgentCode, config: Mapping[str, Any]
) -> Strategy:
    """How to route an agent of a config; `urls` are the keys of models that servers call by themselves."""
    if any(kind in (AGENTS, MODELS) for kind, _ in _typed_references(agent.block)):
        return strategy_for(agent.type, handing, code)
    own = bool(policy_urls(agent, urls))
    strategy = strategy_for(agent.type, handing, code, own_urls=own)
    elsewhere = strategy in (*BY_URL, "process") and not own and _has_foreign_url(agent.block, config)
    return "none" if elsewhere else strategy


def _has_foreign_url(block: Block, config: Mapping[str, Any]) -> bool:
    """Whether an agent is given a model elsewhere, by a URL that is not the gateway's to stand for."""
    values = [str(value) for key, value in block.items() if key.endswith("base_url") and "judge" not in key]
    values += [str(config.get(key)) for value in values for key in forkserver.interpolated(value)]
    return any(value.startswith(("http://", "https://")) for value in values)


def policy_urls(agent: Instance, urls: Collection[str]) -> set[str]:
    """Of these keys, those that an agent without a model server calls its policy by."""
    if any(kind == MODELS for kind, _ in _typed_references(agent.block)):
        return set()
    return {key for key in forkserver.interpolated(agent.block) & {*urls} if "judge" not in key}


def policy_servers(agent: Instance) -> frozenset[str]:
    """Model servers that stand for an agent's policy: those that its block points it at, `policy_model` if at none."""
    named = (reference for key in _OWN_MODEL for reference in _references(agent.block.get(key)))
    return frozenset(named) or frozenset({POLICY})


def servers_to_start(config: Mapping[str, Any], agent: str | None) -> list[Instance]:
    """Resources servers and agents; with `agent`, that one and those it refers to in place of all agents."""
    found = {
        instance.name: instance for instance in instances(config) if instance.kind in (AGENTS, RESOURCES)
    }
    if agent is None:
        return list(found.values())
    agents = sorted(name for name, instance in found.items() if instance.kind == AGENTS)
    if agent not in agents:
        raise ConfigError(f"there is no agent {agent!r}; the config has {', '.join(agents) or 'none'}")
    wanted = _reachable(found, agent)
    return [item for item in found.values() if item.kind == RESOURCES or item.name in wanted]


def _reachable(found: Mapping[str, Instance], start: str) -> set[str]:
    seen: set[str] = set()
    frontier = [start]
    while frontier:
        name = frontier.pop()
        if name in found and name not in seen:
            seen.add(name)
            frontier.extend(_references(found[name].block))
    return seen


def _references(node: Any) -> Iterator[str]:
    """Names in every `{"type": kind, "name": instance}` below a block."""
    return (name for _, name in _typed_references(node))


def _typed_references(node: Any) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        if node.get("type") in KINDS and isinstance(node.get("name"), str):
            yield node["type"], node["name"]
        for child in node.values():
            yield from _typed_references(child)
    elif isinstance(node, list):
        for child in node:
            yield from _typed_references(child)


def placed(
    config: Mapping[str, Any],
    ports: Mapping[str, int],
    gateway: Mapping[str, int],
    ray: str | None = None,
    *,
    capture: bool = False,
) -> dict[str, Any]:
    """The config that servers are given: relays dropped, models on the gateway, every port ours.

    `ports` are those of the servers to start, `gateway` those that stand in for model servers, by instance, and
    for models that a server reaches by a URL of its own (`judge_base_url`), by that key. `capture`: in this release
    `token_id_capture` puts a rollout's key into URLs as `observability_enabled` does.
    """
    result: dict[str, Any] = {}
    for key in config:
        if config[key] == forkserver.NOWHERE and key in gateway:
            result[key] = f"http://{LOOPBACK}:{gateway[key]}/v1"
    for name, block in config.items():
        if isinstance(block, dict) and RELAYS in block:
            continue
        result.setdefault(name, block)
    for instance in instances(config):
        if instance.kind == MODELS:
            if instance.name == POLICY and POLICY_AS_JUDGE in gateway:
                result[POLICY_AS_JUDGE] = _moved(instance, gateway[POLICY_AS_JUDGE], entrypoint=False)
            result[instance.name] = _moved(instance, gateway[instance.name], entrypoint=False)
        elif instance.name in ports:
            result[instance.name] = _moved(instance, ports[instance.name], entrypoint=True)
            if instance.kind == RESOURCES and POLICY_AS_JUDGE in gateway:
                result[instance.name] = _judged_by_policy(result[instance.name])
    if ray is not None:
        result["ray_head_node_address"] = ray
    if capture and only_agents_call_models(config):
        # The rollout's key is in the URL by either; this one spares the agent its record (a fifth of its time).
        block = {**(config.get("token_id_capture") or {}), **_CAPTURE}
        result |= {"observability_enabled": False, "token_id_capture": block}
    return result


def _judged_by_policy(node: Any) -> Any:
    """A block whose references to the policy's model server go to its stand-in for judges."""
    if isinstance(node, dict):
        if node.get("type") == MODELS and node.get("name") == POLICY:
            return {**node, "name": POLICY_AS_JUDGE}
        return {key: _judged_by_policy(child) for key, child in node.items()}
    return [_judged_by_policy(child) for child in node] if isinstance(node, list) else node


def _moved(instance: Instance, port: int, *, entrypoint: bool) -> Block:
    block = {key: value for key, value in instance.block.items() if entrypoint or key != "entrypoint"}
    return {instance.kind: {instance.type: {**block, "host": LOOPBACK, "port": port}}}


def directory_of(instance: Instance, roots: list[Path]) -> Path:
    """Where a server's code is: under the first root that has it."""
    for root in roots:
        directory = root / instance.kind / instance.type
        if (directory / instance.entrypoint).exists():
            return directory
    searched = ", ".join(str(root) for root in roots)
    raise ConfigError(
        f"server {instance.name!r} has no {instance.kind}/{instance.type}/{instance.entrypoint} in {searched}; "
        f"name its directory's root in component_roots"
    )


def component_roots(config_path: Path, named: tuple[str, ...], site: Path) -> list[Path]:
    """Where servers are looked for: the user's roots, the tree the config lies in, the installed nemo-gym."""
    around = [
        parent
        for parent in config_path.parents
        if any((parent / kind).is_dir() for kind in (AGENTS, RESOURCES))
    ]
    return [*(Path(root).expanduser().absolute() for root in named), *around, site]


def uses_ray(directory: Path, entrypoint: str) -> bool:
    """Whether a server's own code calls Ray; what Gym's base classes do with it is not needed. Blocking.

    From 0.7 on a server can say that it does not. What is installed beside the code (a virtual environment, packages, caches)
    is not read.
    """
    if _NO_RAY.search((directory / entrypoint).read_text(errors="replace")):
        return False
    return any(_USES_RAY.search(path.read_text(errors="replace")) for path in own_modules(directory))


def own_modules(directory: Path) -> Iterator[Path]:
    """Python files of a server's own code: none of its tests, virtual environments, installed packages or caches."""
    for parent, children, files in os.walk(directory):
        children[:] = [name for name in children if not _is_foreign(Path(parent, name))]
        yield from (Path(parent, name) for name in files if name.endswith(".py"))


def _is_foreign(directory: Path) -> bool:
    name = directory.name
    return name.startswith(".") or name in _FOREIGN or (directory / "pyvenv.cfg").exists()


def default_agent(config: Mapping[str, Any], chosen: str | None) -> str | None:
    """The agent that rows without `agent_ref` go to: the one named, else the config's first."""
    agents = [instance.name for instance in instances(config) if instance.kind == AGENTS]
    return chosen or (agents[0] if agents else None)


def file_name(name: str) -> str:
    """A name as part of a path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._") or "_"
