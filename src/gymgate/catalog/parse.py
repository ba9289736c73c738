"""Gym's config files, read as Gym's parser reads them: includes, merges, inheritance. Nothing is resolved or run.

Values stay as they stand: `???` and `${...}` are plain strings. What the parser does to a config is documented
by its directives: `config_paths` (included files, overridden by the includer), `_inherit_from` and
`${inherit_from:path}` (move), `_copy` and `${copy:path}` (copy), `_delete_key`, and an agent whose
`resources_server.name` is `???`, which takes the place of every other agent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gymgate.config import POLICY

MISSING = "???"
MODELS, AGENTS = "responses_api_models", "responses_api_agents"
RESOURCES, RELAYS = "resources_servers", "environment_servers"
SERVER_KINDS = (RESOURCES, AGENTS, RELAYS, MODELS)

Node = dict[str, Any]
_DIRECTIVE = re.compile(r"\$\{(inherit_from|copy):(.+)\}$")
_BOUND = ("resources_server", "model_server", "datasets")


class ConfigProblem(ValueError):
    """Why Gym's parser would refuse a config; one line."""


class ConfigReader:
    """Reads configs below some component roots as a nemo-gym release does; each file is parsed once."""

    def __init__(self, roots: Sequence[Path], version: str = "0.7.0") -> None:
        self._roots = tuple(roots)
        self._files: dict[Path, Node] = {}
        self._old = version.startswith(("0.3.", "0.4.", "0.5."))
        """Up to 0.5 an included file overrides the file that includes it, and agents are not composed."""

    def read(self, path: Path) -> Node:
        """The whole config: `path` with what it includes and inherits. Raises `ConfigProblem`."""
        config: Node = {}
        for part in self._included(path):
            merge(config, self.load(part))
        config.pop("config_paths", None)
        config.setdefault(POLICY, copied(_POLICY_MODEL))
        inherit(config)
        if not self._old:
            compose_unbound_agent(config)
        return config

    def load(self, path: Path) -> Node:
        """One file as a mapping, without its includes; do not change it. Raises `ConfigProblem`."""
        if path not in self._files:
            try:
                value = yaml.load(path.read_bytes(), Loader=_LOADER)
            except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
                raise ConfigProblem(f"{path.name}: {' '.join(str(error).split())[:200]}") from error
            self._files[path] = value if isinstance(value, dict) else {}
        return self._files[path]

    def locate(self, name: str) -> Path | None:
        """The file or directory of that relative path, in the first root that has it."""
        if Path(name).is_absolute():
            return Path(name) if Path(name).exists() else None
        return next((root / name for root in self._roots if (root / name).exists()), None)

    def _included(self, path: Path) -> list[Path]:
        """`path` after everything it includes, each file once, in the order in which they override."""
        pending, children, seen = [path], [list[int]()], {path}
        for index, current in enumerate(pending):
            for name in self.load(current).get("config_paths") or ():
                target = self.locate(str(name))
                if target is None:
                    raise ConfigProblem(f"{current.name} includes {name}, which does not exist")
                if target not in seen:
                    seen.add(target)
                    pending.append(target)
                    children.append([])
                    children[index].append(len(pending) - 1)
        if self._old:
            return pending
        order: list[Path] = []

        def visit(index: int) -> None:
            for child in children[index]:
                visit(child)
            order.append(pending[index])

        visit(0)
        return order


_POLICY_MODEL: Node = {MODELS: {"openai_model": {"entrypoint": "app.py"}}}
"""Every stack brings a policy model; configs may copy from it."""

_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def copied(value: Any) -> Any:
    """A deep copy of parsed YAML."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def merge(target: Node, source: Node) -> None:
    """Write `source` over `target`: mappings merge, all else replaces, `???` leaves what is there."""
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        elif value != MISSING or key not in target:
            target[key] = copied(value)


def inherit(config: Node) -> None:
    """Carry out every inheritance, copy and deletion directive in place."""
    _inherit_below(config, config, copied(config))


def _inherit_below(node: Node, root: Node, frozen: Node) -> None:
    for key, value in list(node.items()):
        doomed = _delete_keys(value)
        for child in [value] if isinstance(value, dict) else value if isinstance(value, list) else ():
            if isinstance(child, dict):
                _inherit_below(child, root, frozen)
        source, moves = _directive(value)
        if source is None:
            continue
        parent = _at(root, source[:-1])
        if moves and isinstance(parent, dict):
            parent.pop(source[-1], None)
        found = copied(_at(frozen, source))
        if parent == MISSING or found == MISSING:
            node[key] = MISSING
            continue
        if isinstance(value, dict) and isinstance(found, dict):
            merge(found, value)
        for name in doomed:
            found.pop(name, None)
        node[key] = found


def _delete_keys(value: Any) -> list[str]:
    """Take out what `_delete_key` names; returns the names that come only with the inherited part."""
    if not isinstance(value, dict) or "_delete_key" not in value:
        return []
    names = [name.strip() for name in str(value.pop("_delete_key")).split(",")]
    return [name for name in names if value.pop(name, _ABSENT) is _ABSENT]


_ABSENT = object()


def _directive(value: Any) -> tuple[list[str] | None, bool]:
    """The path a value inherits from and whether that moves it, taken out of the value."""
    if isinstance(value, str) and (match := _DIRECTIVE.match(value)):
        return match[2].split("."), match[1] == "inherit_from"
    if isinstance(value, dict):
        for name in ("_inherit_from", "_copy"):
            if name in value:
                return str(value.pop(name)).split("."), name == "_inherit_from"
    return None, False


def _at(node: Any, path: Sequence[str]) -> Any:
    for key in path:
        if node == MISSING:
            return MISSING
        if not isinstance(node, dict) or key not in node:
            raise ConfigProblem(f"inherits from {'.'.join(path)}, which does not exist")
        node = node[key]
    return node


def instances(config: Node, kind: str) -> dict[str, tuple[str, Node]]:
    """Instance name -> (implementation, its block) of the servers of one kind."""
    found = {}
    for name, value in config.items():
        block = value.get(kind) if isinstance(value, dict) else None
        if isinstance(block, dict) and len(block) == 1:
            ((implementation, settings),) = block.items()
            if isinstance(settings, dict):
                found[str(name)] = (str(implementation), settings)
    return found


def compose_unbound_agent(config: Node) -> None:
    """Let an agent that is bound to no resources server take the place of all others, as Gym does."""
    agents = instances(config, AGENTS)
    unbound = [name for name, (_, block) in agents.items() if _bound_to(block) == MISSING]
    targets = [name for name, (_, block) in agents.items() if _bound_to(block) not in (None, MISSING)]
    if len(unbound) != 1 or not targets:
        return
    implementation, source = agents[unbound[0]]
    config.pop(unbound[0])
    for name in targets:
        old, block = agents[name]
        composed = copied(source) | {key: block[key] for key in _BOUND if key in block}
        instance = config.pop(name)
        instance[AGENTS] = {implementation: composed}
        config[_composed_name(name, old, implementation)] = instance


def _bound_to(block: Node) -> str | None:
    server = block.get("resources_server")
    return server.get("name") if isinstance(server, dict) else None


def _composed_name(name: str, old: str, new: str) -> str:
    stem = name.removesuffix(f"_{old}").removesuffix(old).rstrip("_")
    if stem == name:
        stem = name.removesuffix("_agent").rstrip("_")
    return f"{stem}_{new}" if stem else new
