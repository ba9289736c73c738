"""What a config needs beside the wheel and a policy: an estimate from its text and its servers' sources."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from gymgate.catalog.model import Need, NeedKind, ServerInstance
from gymgate.catalog.parse import AGENTS, MISSING, MODELS, RESOURCES, SERVER_KINDS, Node
from gymgate.config import POLICY
from gymgate.errors import NeedMissingError

_POLICY_VALUES = {"policy_base_url", "policy_api_key", "policy_model_name"}
_INTERPOLATION = re.compile(r"\$\{([^{}]*)\}")
_KEYLIKE = re.compile(r"(api_?key|token|secret|password|base_?url|endpoint)s?$", re.IGNORECASE)
_SECRET = re.compile(r"(api_?key|token|secret|password)$", re.IGNORECASE)
_UNSET = {"", "null", "none", "''", '""', "missing", "unset", "empty", "dummy", MISSING.lower()}
_SANDBOX = re.compile(r"sandbox_(provider|config|spec|host|image)$|container_(formatter|image|path)$")
_OWN_KINDS = {RESOURCES: "resources server", AGENTS: "agent"}


def model_references(servers: dict[str, Node]) -> dict[str, str]:
    """Model server instance -> where it is referred to, for the given server blocks by label."""
    found: dict[str, str] = {}
    for label, block in servers.items():
        for path, value in walk(block):
            if isinstance(value, dict) and value.get("type") == MODELS and isinstance(value.get("name"), str):
                found.setdefault(value["name"], f"{path} of {label}")
    return found


def judge_references(config: Node, servers: Sequence[ServerInstance]) -> dict[str, str]:
    """Model servers other than the policy's that these servers name, each with where."""
    found = model_references(_blocks(config, servers))
    return {
        name: place for name, place in found.items() if name not in (POLICY, MISSING) and "${" not in name
    }


def refuse_unanswered(
    environment: str,
    judges: Mapping[str, str],
    named: Collection[str],
    *,
    keyless: bool = False,
    option: str = "--judge {}=URL",
    hint: str = "",
) -> None:
    """Raise `NeedMissingError` for judges (with where each is named) that are not among the names given, `"*"` for all.

    `keyless`: their calls carry no rollout key, so that the rollout's own policy cannot be who answers.
    """
    missing = {} if "*" in named else {name: place for name, place in judges.items() if name not in named}
    if not missing:
        return
    listed = ", ".join(f"{name!r} ({place})" for name, place in missing.items())
    options = " ".join(option.format(name) for name in missing)
    policy = "" if keyless else "'policy' is the policy itself, "
    raise NeedMissingError(
        f"environment {environment!r} needs an endpoint for model server {listed}: give {options} (in place of URL, {policy}"
        f"'none' starts without one and fails the rollouts that call it), in Python models={{{next(iter(missing))!r}: ...}}"
        f"{hint}",
        environment=environment,
        need=f"judge {', '.join(missing)}",
    )


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value below `node` with its dotted path, containers before what they hold."""
    items: Any = ()
    if isinstance(node, dict):
        items = ((f"{path}.{key}" if path else str(key), value) for key, value in node.items())
    elif isinstance(node, list):
        items = ((f"{path}[{index}]", value) for index, value in enumerate(node))
    for below, value in items:
        yield below, value
        yield from walk(value, below)


def missing_values(config: Node) -> tuple[str, ...]:
    """Dotted paths of values that Gym's parser refuses: `???`, or an interpolation of what is not there."""
    return tuple(path for path, value in walk(config) if _lacks(value, config) is not None)


def _lacks(value: Any, config: Node) -> str | None:
    """What the value needs from the caller: a name to set, `env NAME`, or `None`."""
    if not isinstance(value, str):
        return None
    if value == MISSING:
        return "a value"
    for inner in _INTERPOLATION.findall(value):
        if inner.startswith("oc.env:") and "," not in inner:
            return f"environment variable {inner.removeprefix('oc.env:')}"
        if ":" not in inner and inner not in _POLICY_VALUES and not _defined(inner, config):
            return f"{inner!r}"
    return None


def _defined(path: str, config: Node) -> bool:
    if path.startswith("."):
        return True
    node: Any = config
    for key in path.split("."):
        if not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return bool(node != MISSING)


def config_needs(config: Node, servers: Sequence[ServerInstance]) -> Iterator[Need]:
    """Needs that the config's text shows: judges, values to give, sandboxes."""
    blocks = _blocks(config, servers)
    for name, place in model_references(blocks).items():
        if name == MISSING:
            yield Need("judge", f"{place} names no model server (set its name; {POLICY} is one)")
        elif name != POLICY:
            yield Need("judge", f"model server {name} ({place}){_local_model(config, name)}")
    for label, block in blocks.items():
        yield from _value_needs(config, label, block)


def _blocks(config: Node, servers: Sequence[ServerInstance]) -> dict[str, Node]:
    """Each server's settings, by what the server is called."""
    return {
        f"{_OWN_KINDS[server.kind]} {server.name}": config[server.name][server.kind][server.type]
        for server in servers
    }


def _local_model(config: Node, name: str) -> str:
    instance = config.get(name)
    kinds = instance.get(MODELS) if isinstance(instance, dict) else None
    if not isinstance(kinds, dict):
        return ", not defined in the config"
    return ", a local vLLM unless an endpoint is given" if "local_vllm_model" in kinds else ""


def _value_needs(config: Node, label: str, block: Node) -> Iterator[Need]:
    for path, value in walk({key: item for key, item in block.items() if key != "datasets"}):
        leaf = path.rpartition(".")[2].partition("[")[0]
        if path.endswith((".name", ".type")) and value == MISSING:
            continue
        lacking = _lacks(value, config)
        if lacking is not None:
            kind: NeedKind = (
                "key" if _KEYLIKE.search(lacking.strip("'")) or _KEYLIKE.search(leaf) else "config"
            )
            yield Need(kind, f"{path} of {label} needs {lacking}")
        elif isinstance(value, str) and _SECRET.search(leaf) and _unset_by_default(value):
            yield Need("key", f"{path} of {label} is unset by default ({value})")
        if _SANDBOX.search(leaf) and value not in (None, "", {}):
            yield Need("docker", f"{path} of {label}")


def _unset_by_default(value: str) -> bool:
    """An interpolation whose innermost default says that there is none."""
    innermost = _INTERPOLATION.findall(value)
    return any("," in inner and inner.rpartition(",")[2].strip().lower() in _UNSET for inner in innermost)


def required_needs(config: Node, server: ServerInstance, required: Sequence[str]) -> Iterator[Need]:
    """Fields that the server's class requires and its block does not have."""
    block = config[server.name][server.kind][server.type]
    for field in required:
        if field not in block:
            kind: NeedKind = "key" if _KEYLIKE.search(field) else "config"
            yield Need(
                kind, f"{field} of {_OWN_KINDS[server.kind]} {server.name} has no default and is not set"
            )


def servers_of(config: Node) -> list[ServerInstance]:
    """Every server instance of a config, in its order."""
    found = []
    for name, value in config.items():
        for kind in SERVER_KINDS:
            block = value.get(kind) if isinstance(value, dict) else None
            for type_, settings in block.items() if isinstance(block, dict) else ():
                if isinstance(settings, dict):
                    entrypoint = settings.get("entrypoint")
                    found.append(ServerInstance(str(name), kind, str(type_), entrypoint))
    return found
