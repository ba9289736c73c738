"""Reads NeMo Gym's config files as its parser does, without its interpreter, which takes seconds to start.

Values stay as they are: `???` and `${...}` are plain strings. The parser's directives are carried out: `config_paths`
(included files, overridden by the includer), `_inherit_from` and `${inherit_from:path}` (move), `_copy` and `${copy:path}`
(copy), `_delete_key`, and an agent whose `resources_server.name` is `???`, which takes the place of every other agent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from gymgate.core.config import POLICY
from gymgate.core.errors import ConfigError
from gymgate.core.files import read_whole
from gymgate.gym.inside.resolve import AGENTS, ENVIRONMENT_SERVERS, MISSING, MODELS, Node, servers_of

_LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_POLICY_MODEL: Node = {MODELS: {"openai_model": {"entrypoint": "app.py"}}}
"""Every stack has a policy model, which configs may copy from."""
_DIRECTIVE = re.compile(r"\$\{(inherit_from|copy):(.+)\}$")
_BOUND = ("resources_server", "model_server", "datasets")
"""Settings that an agent keeps when another takes its place."""
_ABSENT = object()
MAX_VALUES = 1_000_000
"""Values in a YAML file. Those of NeMo Gym have at most some hundreds; ten lines of aliases can make billions."""


class ConfigProblem(ValueError):
    """Gym's parser would refuse the config. The message is one line."""


class ConfigReader:
    """Reads configs below some component roots as nemo-gym does; each file is parsed once."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)
        self._files: dict[Path, Node] = {}

    def read(self, *paths: Path) -> Node:
        """Return the whole config: these files in order with everything that they include and inherit.

        Raises `ConfigProblem`.
        """
        config: Node = {}
        for part in self._with_includes(paths):
            merge(config, self.load(part))
        config.pop("config_paths", None)
        config.setdefault(POLICY, copied(_POLICY_MODEL))
        inherit(config)
        compose_unbound_agent(config)
        return config

    def load(self, path: Path) -> Node:
        """Return one file as a mapping, without its includes. Do not change it. Raises `ConfigProblem`."""
        if path not in self._files:
            try:
                value = parse_yaml(path.read_bytes())
            except (OSError, ValueError) as error:
                raise ConfigProblem(f"{path.name}: {' '.join(str(error).split())[:200]}") from error
            self._files[path] = value if isinstance(value, dict) else {}
        return self._files[path]

    def locate(self, name: str) -> Path | None:
        """Return the file or directory with that relative path in the first root that has it."""
        return next((root / name for root in self._roots if (root / name).exists()), None)

    def _with_includes(self, paths: Sequence[Path]) -> list[Path]:
        """Return `paths` and all files that they include, each once; later ones override earlier ones."""
        pending, children = [*paths], dict[Path, list[Path]]()
        for current in pending:
            children[current] = []
            for name in self.load(current).get("config_paths") or ():
                target = self.locate(str(name))
                if target is None:
                    raise ConfigProblem(f"{current.name} includes {name}, which does not exist")
                if target not in pending:
                    pending.append(target)
                    children[current].append(target)

        def flat(file: Path) -> list[Path]:
            return [included for child in children[file] for included in flat(child)] + [file]

        return [file for path in paths for file in flat(path)]


def parse_yaml(text: str | bytes) -> Any:
    """Return the value that YAML text holds.

    Raises `ValueError` for other text, and for aliases by which a value refers to itself or grows beyond `MAX_VALUES`.
    """
    try:
        value = yaml.load(text, Loader=_LOADER)
        if _values_in(value, {}) > MAX_VALUES:
            raise ValueError(f"with its aliases it holds more than {MAX_VALUES} values")
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return value


def _values_in(value: Any, counts: dict[int, int]) -> int:
    """Count the values in a value, those of an alias each time. Raises `ValueError` if it holds itself."""
    if not isinstance(value, dict | list):
        return 1
    if counts.get(id(value)) == 0:
        raise ValueError("a value refers to itself")
    if id(value) not in counts:
        counts[id(value)] = 0
        parts = value.values() if isinstance(value, dict) else value
        counts[id(value)] = 1 + sum(_values_in(part, counts) for part in parts)
    return counts[id(value)]


def read_yaml(path: Path, name: str) -> Any:
    """Return the value in a YAML file that the user named. Raises `ConfigError`, one line that begins with `name`."""
    try:
        with path.open("rb") as file:
            return parse_yaml(read_whole(file))
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{name} is not YAML: {' '.join(str(error).split())}") from None


def copied(value: Any) -> Any:
    """Return a deep copy of parsed YAML in which aliases no longer share a value with their anchor."""
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
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, dict):
                _inherit_below(child, root, frozen)
        source, moves = _directive(value)
        if not source:
            continue
        parent = _at(root, source[:-1])
        if moves and isinstance(parent, dict):
            parent.pop(source[-1], None)
        inherited = copied(_at(frozen, source))
        if parent == MISSING or inherited == MISSING:
            node[key] = MISSING
            continue
        if isinstance(value, dict) and isinstance(inherited, dict):
            merge(inherited, value)
        for name in doomed:
            inherited.pop(name, None)
        node[key] = inherited


def _delete_keys(value: Any) -> list[str]:
    """Remove the keys that `_delete_key` names. Return those that are not there yet: they come with the inherited part."""
    if not isinstance(value, dict) or "_delete_key" not in value:
        return []
    names = [name.strip() for name in str(value.pop("_delete_key")).split(",")]
    return [name for name in names if value.pop(name, _ABSENT) is _ABSENT]


def _directive(value: Any) -> tuple[list[str], bool]:
    """Remove a value's directive. Return the path that it inherits from, empty for none, and whether the source is moved."""
    if isinstance(value, str) and (match := _DIRECTIVE.match(value)):
        return match[2].split("."), match[1] == "inherit_from"
    for name in ("_inherit_from", "_copy"):
        if isinstance(value, dict) and name in value:
            return str(value.pop(name)).split("."), name == "_inherit_from"
    return [], False


def _at(node: Any, path: Sequence[str]) -> Any:
    for key in path:
        if node == MISSING:
            return MISSING
        if not isinstance(node, dict) or key not in node:
            raise ConfigProblem(f"inherits from {'.'.join(path)}, which does not exist")
        node = node[key]
    return node


def compose_unbound_agent(config: Node) -> None:
    """Let an agent that is bound to no resources server take the place of all others, as Gym does."""
    agents = servers_of(config, AGENTS)
    unbound = [agent for agent in agents if agent.resources_server == MISSING]
    targets = [agent for agent in agents if agent.resources_server not in (None, MISSING)]
    if len(unbound) != 1 or not targets:
        return
    (new,) = unbound
    config.pop(new.name)
    for old in targets:
        bound = {key: old.block[key] for key in _BOUND if key in old.block}
        instance = config.pop(old.name)
        instance[AGENTS] = {new.type: copied(new.block) | bound}
        composed = _composed_name(old.name, old.type, new.type)
        config[composed] = instance
        for server in servers_of(config, ENVIRONMENT_SERVERS):
            if old.name in server.called_agents:
                server.block.update(_renamed(server.block, old.name, composed))


def _renamed(block: Node, old: str, new: str) -> Node:
    """Return a block's references to an agent of that name, with another."""
    return {
        key: {**value, "name": new}
        for key, value in block.items()
        if isinstance(value, dict) and value.get("name") == old
    }


def _composed_name(name: str, old: str, new: str) -> str:
    stem = name.removesuffix(f"_{old}").removesuffix(old).rstrip("_")
    if stem == name:
        stem = name.removesuffix("_agent").rstrip("_")
    return f"{stem}_{new}" if stem else new
