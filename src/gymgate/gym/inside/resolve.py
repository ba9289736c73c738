"""A NeMo Gym config as a tree of values, and how NeMo Gym's own parser resolves it.

`gym` and `stack` import this module too; `resolve` is called in NeMo Gym's interpreter.
"""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .names import gym_symbol

MODELS, AGENTS = "responses_api_models", "responses_api_agents"
RESOURCES, ENVIRONMENT_SERVERS = "resources_servers", "environment_servers"
SERVER_KINDS = (RESOURCES, AGENTS, ENVIRONMENT_SERVERS, MODELS)
RELAY, AGENT_SERVER = "legacy_agent", "agent_server"
"""The environment server that passes each row on to its agent, and the setting of an environment server that names its agent."""
SANDBOX, DEFAULT_METADATA = "sandbox_provider", "default_metadata"
"""The setting that chooses a server's sandbox provider, and the entry beside the provider in the block that it names."""
MISSING = "???"
"""Stands for a value that another config or the user must give."""
NOWHERE = "http://127.0.0.1:1/v1"
"""Placeholder for a model's URL, which the stack replaces by one of the gateway."""
DEFAULT_MODEL = "responses_api_models/openai_model/configs/openai_model.yaml"
STAND_IN_MODEL = {
    "entrypoint": "app.py",
    "openai_base_url": NOWHERE,
    "openai_api_key": "gymgate",
    "openai_model": "model",
}

Node = dict[str, Any]
_TOP_LEVEL_KEY = re.compile(r"\$\{([A-Za-z_]\w*)\}")


class ServerInstance(NamedTuple):
    """A server that a config names."""

    name: str
    """Top-level key of the config."""
    kind: str
    """One of `SERVER_KINDS`."""
    type: str
    """Directory of its implementation under `kind`."""
    block: Node
    """Its settings."""

    @property
    def entrypoint(self) -> str:
        """File in its directory. Empty if another config names it; alone, this one then starts nothing."""
        return str(self.block.get("entrypoint") or "")

    @property
    def key(self) -> str:
        """Dotted key of its settings."""
        return f"{self.name}.{self.kind}.{self.type}"

    @property
    def resources_server(self) -> str | None:
        """The resources server that an agent works with; `???` if another config says which."""
        reference = self.block.get("resources_server")
        return reference.get("name") if isinstance(reference, dict) else None

    @property
    def is_relay(self) -> bool:
        """Whether it only passes rows on to an agent's own `/run`."""
        return self.kind == ENVIRONMENT_SERVERS and self.type == RELAY

    @property
    def called_agents(self) -> tuple[str, ...]:
        """The agents of an environment server, in its order: all settings that refer to one, as NeMo Gym reads them."""
        names = (
            value.get("name")
            for key, value in self.block.items()
            if isinstance(value, dict)
            and (value.get("type") == AGENTS or (key == AGENT_SERVER and value.get("type") is None))
        )
        return tuple(dict.fromkeys(str(name) for name in names if name is not None))

    @property
    def attributed_agent(self) -> str | None:
        """The agent to which NeMo Gym attributes an environment server's results: its `agent_server`, or the only one."""
        reference = self.block.get(AGENT_SERVER)
        if isinstance(reference, dict):
            return reference.get("name")
        return self.called_agents[0] if len(self.called_agents) == 1 else None


def servers_of(config: Mapping[str, Any], *kinds: str) -> list[ServerInstance]:
    """Return the servers of these kinds, or of every kind, that a config names, in its order."""
    return [
        ServerInstance(str(name), kind, str(type_), block)
        for name, instance in config.items()
        for kind in (kinds or SERVER_KINDS)
        for type_, block in _items(instance.get(kind) if isinstance(instance, dict) else None)
        if isinstance(block, dict)
    ]


def _items(node: Any) -> Iterable[tuple[str, Any]]:
    return node.items() if isinstance(node, dict) else ()


class SandboxReference(NamedTuple):
    """A server's setting that chooses its sandbox provider."""

    setting: str
    """Its dotted key in the config."""
    name: str | None
    """The top-level block that it names; `None`: it holds the provider's settings itself."""
    provider: str | None
    """The provider that the config sets; `None` if it leaves the block to another config."""


def sandbox_references(config: Mapping[str, Any]) -> list[SandboxReference]:
    """Return the settings with which the servers of a config choose a sandbox provider, in its order."""
    references = []
    for server in servers_of(config, RESOURCES, AGENTS):
        for path, value in walk(server.block):
            if path.rpartition(".")[2] != SANDBOX or "[" in path or not value:
                continue
            setting = f"{server.key}.{path}"
            if isinstance(value, str):
                whole = _TOP_LEVEL_KEY.fullmatch(value)
                name = whole[1] if whole else value
                references.append(SandboxReference(setting, name, provider_in(config.get(name))))
            elif isinstance(value, dict):
                references.append(SandboxReference(setting, None, provider_in(value)))
    return references


def provider_in(block: Any) -> str | None:
    """Return the provider that a sandbox's block sets: its only key beside those with a meaning of their own."""
    keys = [key for key, value in _items(block) if key != DEFAULT_METADATA and value is not None]
    return str(keys[0]) if len(keys) == 1 else None


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, or `None`."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def walk(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a node and every value below it with their dotted paths, containers first."""
    yield path, node
    for key, value in _items(node):
        yield from walk(value, f"{path}.{key}" if path else str(key))
    for index, value in enumerate(node if isinstance(node, list) else ()):
        yield from walk(value, f"{path}[{index}]")


def references(node: Any) -> Iterator[tuple[str, str, str]]:
    """Yield dotted path, kind and name of each reference to a server below a node: `{"type": kind, "name": name}`."""
    for path, value in walk(node):
        if (
            isinstance(value, dict)
            and value.get("type") in SERVER_KINDS
            and isinstance(value.get("name"), str)
        ):
            yield path, value["type"], value["name"]


def interpolated_keys(node: Any) -> set[str]:
    """Return the top-level keys that strings below a node interpolate as `${key}`."""
    strings = (value for _, value in walk(node) if isinstance(value, str))
    return {key for text in strings for key in _TOP_LEVEL_KEY.findall(text)}


def resolve(order: dict[str, Any]) -> dict[str, Any]:
    """Resolve a config: `{"config": {...}, "added": [...]}`, `{"missing": [keys that the user must give]}`,
    `{"unknown": message}` for an override of a server that is not there, or `{"error": message}`.

    `added` are the keys of overrides that no file has, each with the position of its first unknown part. The order has
    `config_paths`, `overrides` (pairs of a dotted key and a value; a `+` before the key says that it may be unknown), the
    `initial` config, the name of the `policy`'s model server, and the `sandbox` provider to make room for, or `None`.
    This changes NeMo Gym's globals, so call it in a process of its own.
    """
    Parser: Any = gym_symbol("GlobalConfigDictParser")
    OmegaConf: Any = importlib.import_module("omegaconf").OmegaConf
    try:
        paths, initial = list(order["config_paths"]), OmegaConf.create(order["initial"])
        for key, value in order["overrides"]:
            OmegaConf.update(initial, key.lstrip("+"), value, force_add=True)
        files = Parser().load_extra_config_paths(paths)[1]
        merged = OmegaConf.to_container(OmegaConf.merge(*files, initial), resolve=False)
        defined = {*order["initial"], *(key for file in files for key in file)}
        defined |= {*gym_symbol("NEMO_GYM_RESERVED_TOP_LEVEL_KEYS")}
        before = OmegaConf.to_container(
            OmegaConf.merge(*files, OmegaConf.create(order["initial"])), resolve=False
        )
        overridden = [
            (key, value)
            for pair in order["overrides"]
            for key, value in leaves(*pair)
            if not key.startswith("+")
        ]
        if unknown := unknown_names(merged, defined, [key for key, _ in overridden]):
            servers = ", ".join(sorted({server.name for server in servers_of(merged)} & defined))
            name = unknown[0].partition(".")[0]
            return {"unknown": f"override {unknown[0]!r}: there is no {name!r}; the config has {servers}"}
        if order["policy"] not in merged:
            paths.append(DEFAULT_MODEL)
        for name in undefined_models(merged) - {order["policy"]}:
            initial[name] = {MODELS: {"openai_model": dict(STAND_IN_MODEL)}}
        if references := sandbox_references(merged):
            _leave_room_for_sandboxes(OmegaConf, initial, merged, references, order["sandbox"])
            merged = OmegaConf.to_container(OmegaConf.merge(*files, initial), resolve=False)
        values, missing = unset(merged)
        if missing:
            return {"missing": missing}
        for key, value in values.items():
            OmegaConf.update(initial, key, value, force_add=True)
        initial.config_paths = paths
        try:
            config = _gyms_parse(initial)
        except Exception as error:
            if type(error).__name__ != "AlmostServerError":
                raise
            traceback.print_exc()  # Try again without datasets: gymgate reads them itself, so they need not be valid.
            for key in dataset_lists(merged):
                OmegaConf.update(initial, key, [], force_add=True)
            config = _gyms_parse(initial)
        added = [(key, unknown_part(before, key)) for key, _ in overridden]
        return {
            "config": OmegaConf.to_container(config, resolve=False),
            "added": [(key, position) for key, position in added if position is not None],
        }
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _leave_room_for_sandboxes(
    OmegaConf: Any, initial: Any, merged: Node, references: Iterable[SandboxReference], chosen: str | None
) -> None:
    """Let the parser accept blocks of sandboxes that the caller defines afterwards, and nothing of those that it replaces.

    A block that the parser reads may interpolate variables that are set only for those who use its provider.
    """
    for reference in references:
        key = reference.name or reference.setting
        block = value_at(merged, key)
        if block is None:
            OmegaConf.update(initial, key, {DEFAULT_METADATA: {}}, force_add=True)
        for provider, _ in _items(block if chosen is not None else None):
            if provider not in (chosen, DEFAULT_METADATA):
                OmegaConf.update(initial, f"{key}.{provider}", None, force_add=True)


def _gyms_parse(initial: Any) -> Any:
    return gym_symbol("GlobalConfigDictParser")().parse(
        gym_symbol("GlobalConfigDictParserConfig")(
            initial_global_config_dict=initial, skip_load_from_cli=True, skip_load_from_dotenv=True
        )
    )


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys that an override sets, with their values."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(f"{key}.{name}", item)
    else:
        yield key, value


def unknown_part(config: Node, key: str) -> int | None:
    """Return the position of the first part of a dotted key that a config does not have; `None` if it has all.

    What is below a list or an interpolation counts as there.
    """
    node: Any = config
    for position, part in enumerate(key.split(".")):
        if not isinstance(node, dict):
            return None
        node = _with_inherited(config, node)
        if part not in node:
            return position
        node = node[part]
    return None


def _with_inherited(config: Node, node: Node, hops: int = 9) -> Node:
    """Return a block with what it takes from others, as NeMo Gym's parser will."""
    for source in (node.get(directive) for directive in ("_inherit_from", "_copy")):
        if isinstance(source, str) and isinstance(base := value_at(config, source), dict) and hops:
            node = _overlaid(_with_inherited(config, base, hops - 1), node)
    return node


def _overlaid(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    common = {key: _overlaid(below[key], above[key]) for key in above if key in below}
    return {**below, **above, **common}


def unknown_names(merged: Node, defined: Container[str], overrides: Iterable[str]) -> list[str]:
    """Return the dotted keys of overrides that begin with a name that is not `defined` and that they alone do not give a meaning.

    They give it one if they define a whole server, or if another server refers to the name.
    """
    in_use = {server.name for server in servers_of(merged) if server.entrypoint}
    in_use |= {name for _, _, name in references(merged)} | interpolated_keys(merged)
    in_use |= {reference.name for reference in sandbox_references(merged) if reference.name is not None}
    firsts = ((key, *key.partition(".")[:2]) for key in overrides)
    return [key for key, first, dot in firsts if dot and first not in defined and first not in in_use]


def undefined_models(merged: Node) -> set[str]:
    """Return model servers that servers refer to and no file defines. The gateway stands in for them as for any other."""
    referenced = {name for _, kind, name in references(merged) if kind == MODELS and "${" not in name}
    return referenced - {MISSING, *merged}


def unset(merged: Node) -> tuple[dict[str, str], list[str]]:
    """Return what a merged config lacks: placeholders by dotted key for its model servers, which the gateway stands in for,
    and the keys that its other servers interpolate, which the user must give."""
    placeholders: dict[str, str] = {}
    others: set[str] = set()
    for server in servers_of(merged):
        keys = interpolated_keys(server.block) - {*merged}
        if server.kind == MODELS:
            paths = [path for path, value in walk(server.block) if value == MISSING and "[" not in path]
            blanks = [f"{server.key}.{path}" for path in paths]
            placeholders |= {key: placeholder(key) for key in (*keys, *blanks)}
        else:
            others |= keys
    return placeholders, sorted(others - {*placeholders})


def placeholder(key: str) -> str:
    """Return a value for a setting of a model server that is never called."""
    return NOWHERE if key.endswith("url") else "gymgate"


def dataset_lists(merged: Node) -> list[str]:
    """Return the dotted keys of the datasets that agents declare."""
    return [f"{agent.key}.datasets" for agent in servers_of(merged, AGENTS) if "datasets" in agent.block]
