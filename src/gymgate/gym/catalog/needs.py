"""The needs of a config beyond the wheel and a policy, estimated from its text."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from gymgate.core.config import POLICY
from gymgate.core.errors import NeedMissingError, near
from gymgate.gym.inside.resolve import (
    AGENTS,
    ENVIRONMENT_SERVERS,
    MISSING,
    MODELS,
    RESOURCES,
    Node,
    ServerInstance,
    references,
    servers_of,
    walk,
)

NeedKind = Literal[
    "package", "judge", "key", "docker", "download", "git", "gpu", "binary", "config", "search"
]
"""package: from an index, installed on first use; judge: a model server other than the policy's; key: an API key
or an endpoint's URL; docker: a container or sandbox service; download, git: fetched when the server starts or
runs; gpu: torch or vLLM in the server; binary: a program on PATH; config: a value without a default;
search: a web search service."""

_POLICY_VALUES = {"policy_base_url", "policy_api_key", "policy_model_name"}
_INTERPOLATION = re.compile(r"\$\{([^{}]*)\}")
_KEYLIKE = re.compile(r"(api_?key|token|secret|password|base_?url|endpoint)s?'?$", re.IGNORECASE)
_SECRET = re.compile(r"(api_?key|token|secret|password)$", re.IGNORECASE)
_UNSET = {"", "null", "none", "''", '""', "missing", "unset", "empty", "dummy", MISSING.lower()}
_SANDBOX = re.compile(r"sandbox_(provider|config|spec|host|image)$|container_(formatter|image|path)$")
_OWN_MODEL = ("model_server", "policy_model_server")
"""Keys of an agent's block that name its policy. Other keys name judges and user simulators."""
_LABELS = {RESOURCES: "resources server", AGENTS: "agent", ENVIRONMENT_SERVERS: "environment server"}


@cache
def code_places() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what was read of the places in the release's servers and agents that run code, by `KIND/TYPE` and file.

    `code_places.toml` explains it.
    """
    return tomllib.loads((resources.files("gymgate.gym.catalog") / "code_places.toml").read_text("utf-8"))


def runs_text_of(source: Literal["answer", "row"], servers: Iterable[ServerInstance]) -> bool:
    """Whether one of these servers is known to run code of an answer, or of a row, with the user's rights."""
    read = (code_places().get(f"{server.kind}/{server.type}", {}) for server in servers)
    return any(source in place["reached"] for files in read for place in files.values())


@dataclass(frozen=True)
class Need:
    """Something that a config needs beyond the wheel and a policy. An estimate from files."""

    kind: NeedKind
    detail: str


def model_references(servers: Sequence[ServerInstance]) -> dict[str, str]:
    """Return the model servers that these servers name, each with the first setting that names it."""
    settings: dict[str, str] = {}
    for server in servers:
        for path, kind, name in references(server.block):
            if kind == MODELS:
                settings.setdefault(name, f"{path} of {_label(server)}")
    return settings


def judges_with_policy(server: ServerInstance) -> bool:
    """Whether a server that does not play the policy itself refers to the policy's model server, for a judge or a user."""
    is_player = server.kind == AGENTS or (server.kind == ENVIRONMENT_SERVERS and not server.called_agents)
    return not is_player and POLICY in {name for _, _, name in references(server.block)}


def policy_servers(agent: ServerInstance) -> frozenset[str]:
    """Return the model servers that are an agent's policy: those that its block names, else the usual one."""
    groups = (references(agent.block.get(key)) for key in _OWN_MODEL)
    servers = frozenset(name for group in groups for _, kind, name in group if kind == MODELS)
    return servers or frozenset({POLICY})


def trained_agent(server: ServerInstance, agents: Mapping[str, ServerInstance]) -> str | None:
    """Return the agent of an environment server that stands for the policy: the one to which NeMo Gym attributes its results,
    else the only one with the policy's model server. `None`: there are several.
    """
    if server.attributed_agent is not None:
        return server.attributed_agent
    names = [
        name for name in server.called_agents if name in agents and POLICY in policy_servers(agents[name])
    ]
    return names[0] if len(names) == 1 else None


def judge_references(servers: Sequence[ServerInstance]) -> dict[str, str]:
    """Return the model servers other than the policy's that these servers name, each with the first setting that names it.

    An agent that another server names plays a part in that one's rollouts, such as the user. Its model is no policy, unless
    that one is an environment server, and the agent the one that stands for the policy.
    """
    agents = {server.name: server for server in servers if server.kind == AGENTS}
    called: set[str] = set()
    for server in servers:
        names = {name for _, kind, name in references(server.block) if kind == AGENTS}
        if server.kind == ENVIRONMENT_SERVERS:
            names -= {trained_agent(server, agents) or ""}
        called |= names
    settings: dict[str, str] = {}
    for server in servers:
        leads = server.kind == AGENTS and server.name not in called
        block = {key: value for key, value in server.block.items() if not leads or key not in _OWN_MODEL}
        for name, setting in model_references([server._replace(block=block)]).items():
            if name not in (POLICY, MISSING) and "${" not in name:
                settings.setdefault(name, setting)
    return settings


def refuse_unanswered(
    environment: str,
    judges: Mapping[str, str],
    answered: Collection[str],
    *,
    keyless: bool = False,
    option: str | None = None,
    hint: str = "",
) -> None:
    """Raise `NeedMissingError` for each of `judges` (name -> the setting that names it) that is not among `answered`, the names
    with an endpoint. `"*"` names all.

    `keyless`: their calls carry no rollout key, so the rollout's own policy cannot answer them. `option` gives them endpoints, in
    place of `--judge`.
    """
    missing = (
        {} if "*" in answered else {name: setting for name, setting in judges.items() if name not in answered}
    )
    if not missing:
        return
    listed = ", ".join(f"{name!r} ({setting})" for name, setting in missing.items())
    options = option or " ".join(f"--judge {name}=URL" for name in missing)
    first = next(iter(missing))
    key = "" if option else f"MODEL@URL sets a model, --judge-key-var {first}=VAR a key; "
    policy = "" if keyless else "'policy' is the policy itself, "
    likely = {name: close[0] for name in answered if name not in judges and (close := near(name, [*missing]))}
    meant = "".join(f"; did you mean {other!r} by {name!r}?" for name, other in sorted(likely.items()))
    raise NeedMissingError(
        f"environment {environment!r} needs an endpoint for model server {listed}: give {options} ({key}instead of URL, {policy}"
        f"'none' starts without one and fails the rollouts that call it), in Python models={{{first!r}: ...}}{hint}{meant}",
        environment=environment,
        need=f"judge {', '.join(missing)}",
        kind="judge",
    )


def missing_values(config: Node) -> tuple[str, ...]:
    """Return the dotted paths of values that Gym's parser refuses: `???`, or an interpolation of a missing key."""
    return tuple(path for path, value in walk(config) if _lacks(value, config) is not None)


def _lacks(value: Any, config: Node) -> str | None:
    """Return what the user must give for a value: `a value`, a quoted key or an environment variable. `None`: nothing."""
    if not isinstance(value, str):
        return None
    if value == MISSING:
        return "a value"
    for inner in _INTERPOLATION.findall(value):
        if inner.startswith("oc.env:") and "," not in inner:
            return f"environment variable {inner.removeprefix('oc.env:')}"
        if ":" not in inner and inner not in _POLICY_VALUES and not _is_defined(inner, config):
            return f"{inner!r}"
    return None


def _is_defined(path: str, config: Node) -> bool:
    if path.startswith("."):
        return True
    node: Any = config
    for key in path.split("."):
        if not isinstance(node, dict) or key not in node:
            return False
        node = node[key]
    return bool(node != MISSING)


def config_needs(config: Node, servers: Sequence[ServerInstance]) -> Iterator[Need]:
    """Yield the needs of these servers that the config's text shows: judges, values to give, sandboxes."""
    models = {server.name: server.type for server in servers_of(config, MODELS)}
    for name, setting in model_references(servers).items():
        if name == MISSING:
            yield Need("judge", f"{setting} names no model server (set its name; {POLICY} is one)")
        elif name != POLICY:
            yield Need("judge", f"model server {name} ({setting}){_served_by(models.get(name))}")
    for server in servers:
        yield from _value_needs(config, server)


def _served_by(model_type: str | None) -> str:
    if model_type is None:
        return ", not defined in the config"
    return ", a local vLLM unless an endpoint is given" if model_type == "local_vllm_model" else ""


def _value_needs(config: Node, server: ServerInstance) -> Iterator[Need]:
    label = _label(server)
    for path, value in walk({key: item for key, item in server.block.items() if key != "datasets"}):
        leaf = path.rpartition(".")[2].partition("[")[0]
        if path.endswith((".name", ".type")) and value == MISSING:
            continue
        if lacking := _lacks(value, config):
            yield Need(_kind(lacking, leaf), f"{path} of {label} needs {lacking}")
        elif isinstance(value, str) and _SECRET.search(leaf) and _unset_by_default(value):
            yield Need("key", f"{path} of {label} is unset by default ({value})")
        elif isinstance(value, str) and "/nonexistent/" in value:
            yield Need("config", f"{path} of {label} is unset by default ({value})")
        if _SANDBOX.search(leaf) and value not in (None, "", {}):
            yield Need("docker", f"{path} of {label}")


def _unset_by_default(value: str) -> bool:
    """Whether the innermost default of an interpolation stands for "not set"."""
    innermost = _INTERPOLATION.findall(value)
    return any("," in inner and inner.rpartition(",")[2].strip().lower() in _UNSET for inner in innermost)


def required_needs(server: ServerInstance, required: Sequence[str]) -> Iterator[Need]:
    """Yield a need for each field that the server's class requires and its block lacks."""
    for field in required:
        if field not in server.block:
            yield Need(_kind(field), f"{field} of {_label(server)} has no default and is not set")


def _kind(*names: str) -> NeedKind:
    return "key" if any(_KEYLIKE.search(name) for name in names) else "config"


def _label(server: ServerInstance) -> str:
    return f"{_LABELS[server.kind]} {server.name}"
