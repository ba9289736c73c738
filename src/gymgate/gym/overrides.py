"""Whether anything reads the settings that a user overrides.

NeMo Gym takes any key of a server's block and ignores those that nothing reads, so a typo would have no effect and no message.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gymgate.core.errors import ConfigError, near
from gymgate.gym.inside.resolve import Node, ServerInstance, servers_of, value_at, walk
from gymgate.gym.open_needs import TELEMETRY
from gymgate.gym.server_code import own_files

_READ_BY_GYM = frozenset(
    {"datasets", "description", "value", "verified", "verified_url", "allowed_agents", "allowed_model_types"}
)
"""Settings of any server that NeMo Gym reads itself. All others are fields of the server's config class."""
_READ = re.compile(
    r"""\bconfig\w*\.(\w+)|\bconfig\w*(?:\.get\(|\[|,)\s*["'](\w+)|\bmodel_extra\W+(?:get\W+)?(\w+)"""
)
"""What code takes from its config, declared or not."""
_NAMES = re.compile(r"""["'](\w+)["']|\bconfig\w*\.(\w+)|^\s+(\w+)\s*:""", re.MULTILINE)
"""What may be a setting's name: a string, an attribute of a config, a field of a class."""
_BASES = frozenset({"BaseModel", "ABC", "Generic", "object"})
_WRAPPERS = frozenset({"Annotated", "ClassVar", "Field", "Optional", "Union"})
_Class = tuple[Path, ast.ClassDef]
_Fields = Mapping[str, tuple[Path, ast.expr]]
"""Names of a config class with their annotations and the files that hold these."""


def refuse_unknown(
    environment: str, added: Iterable[tuple[str, int]], config: Node, roots: Sequence[Path]
) -> None:
    """Raise `ConfigError` for an override of a setting that neither the config nor code has. Blocks.

    `added` are the dotted keys of overrides that the config files lack, each with the position of its first unknown part;
    `config` is resolved, with overrides; the last of the `roots` is the installed nemo-gym. A key is taken as it is where
    the code does not say which there are.
    """
    for key, position in added:
        parts = key.split(".")
        known = _names_at(parts, position, config, roots)
        if known is None or parts[position] in known:
            continue
        close = near(parts[position], sorted(known))
        hint = f"; near names: {', '.join(close)}" if close else ""
        raise ConfigError(
            f"environment {environment!r}: override {key!r} has no effect: nothing reads {parts[position]!r}{hint}; "
            f"+{key} sets it all the same"
        )


def _names_at(parts: Sequence[str], position: int, config: Node, roots: Sequence[Path]) -> set[str] | None:
    """Return the names that may stand at a position of a key; `None`: any."""
    if position == 0 and len(parts) > 1:  # `resolve` has looked at the name
        return None
    block = value_at(config, ".".join(parts[:position])) if position else config
    siblings = {*block} - {parts[position]} if isinstance(block, Mapping) else set()
    if position == 0 or parts[0] == TELEMETRY:  # read by name, wherever
        return None if parts[position] in _words(config, roots) else siblings
    servers = {server.key: server for server in servers_of({parts[0]: config.get(parts[0])})}
    if not servers:  # a block that servers interpolate
        return None
    server = servers.get(".".join(parts[:3]))
    if position < 3:
        is_whole = server is not None and server.entrypoint
        return None if is_whole or parts[position].startswith("_") else siblings
    fields = None if server is None else _fields_of_server(server, roots)
    for part in parts[3:position]:
        fields = _fields_below(*fields[part], roots) if fields and part in fields else None
    if fields is None:
        return None
    read = _read_names(server, roots) if server is not None and position == 3 else set()
    return siblings | {*fields} | read


def _words(config: Node, roots: Sequence[Path]) -> set[str]:
    """Return what may be a setting's name in NeMo Gym's code and that of the servers, and words in values that interpolate."""
    files = [*(roots[-1] / "nemo_gym").rglob("*.py")]
    for server in servers_of(config):
        files += _code(server, roots)
    texts = [path.read_text(errors="replace") for path in files]
    values = [value for _, value in walk(config) if isinstance(value, str) and "${" in value]
    names = {name for text in texts for found in _NAMES.findall(text) for name in found if name}
    return names.union(*(re.findall(r"\w+", value) for value in values))


def _code(server: ServerInstance, roots: Iterable[Path]) -> list[Path]:
    """Return the modules of a server's code; the one that is started comes first."""
    for directory in (root / server.kind / server.type for root in roots):
        if (directory / server.entrypoint).is_file():
            return [directory / server.entrypoint, *own_files(directory)]
    return []


def _read_names(server: ServerInstance, roots: Sequence[Path]) -> set[str]:
    texts = (path.read_text(errors="replace") for path in _code(server, roots))
    return {name for text in texts for names in _READ.findall(text) for name in names if name} | _READ_BY_GYM


def _fields_of_server(server: ServerInstance, roots: Sequence[Path]) -> _Fields | None:
    """Return the fields of the classes that the `config` of a server's classes may have; `None` if one is not found."""
    if not (code := _code(server, roots)):
        return None
    fields: dict[str, tuple[Path, ast.expr]] = {}
    for cls in _module(code[0]).values():
        if isinstance(cls, ast.ClassDef) and (own := _fields((code[0], cls), roots)) and "config" in own:
            if (more := _fields_below(*own["config"], roots)) is None:
                return None
            fields |= more
    return fields or None


def _fields_below(path: Path, annotation: ast.expr, roots: Sequence[Path]) -> _Fields | None:
    """Return the fields of the classes in an annotation; `None` if it allows a dict or a class that is not found."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    fields: dict[str, tuple[Path, ast.expr]] = {}
    for name in (node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)):
        if name in _WRAPPERS:
            continue
        cls = _find(path, name, roots)
        if cls is None or (more := _fields(cls, roots)) is None:
            return None
        fields |= more
    return fields or None


def _fields(cls: _Class, roots: Sequence[Path], below: tuple[_Class, ...] = ()) -> _Fields | None:
    """Return a class's annotated names, inherited ones and aliases included; `None` if a base is not found."""
    path, node = cls
    fields: dict[str, tuple[Path, ast.expr]] = {}
    for base in (base.value if isinstance(base, ast.Subscript) else base for base in node.bases):
        if isinstance(base, ast.Name) and base.id in _BASES:
            continue
        parent = _find(path, base.id, roots) if isinstance(base, ast.Name) else None
        if parent is None or parent in below or (more := _fields(parent, roots, (*below, cls))) is None:
            return None
        fields |= more
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names = {statement.target.id, *(_aliases(statement.value) if statement.value else ())}
            fields |= dict.fromkeys(names, (path, statement.annotation))
    return fields


def _aliases(value: ast.expr) -> Iterator[str]:
    for keyword in (node for node in ast.walk(value) if isinstance(node, ast.keyword)):
        if keyword.arg in ("alias", "validation_alias"):
            yield from (str(part.value) for part in ast.walk(keyword.value) if isinstance(part, ast.Constant))


def _find(path: Path, name: str, roots: Sequence[Path], hops: int = 9) -> _Class | None:
    """Return the class that a name of a module means, through imports from the roots; `None` if it is not there."""
    node = _module(path).get(name)
    if isinstance(node, ast.ClassDef):
        return path, node
    if node is None or not hops:
        return None
    module = Path(*(node.module or "").split("."))
    bases = [path.parents[node.level - 1]] if node.level else [path.parent, *roots]
    files = [
        path for base in bases for path in ((base / module).with_suffix(".py"), base / module / "__init__.py")
    ]
    source = next((file for file in files if file.is_file()), None)
    original = next(alias.name for alias in node.names if name == (alias.asname or alias.name))
    return _find(source, original, roots, hops - 1) if source is not None else None


def _module(path: Path) -> dict[str, ast.ClassDef | ast.ImportFrom]:
    """Return a module's classes and `from` imports by name."""
    try:
        tree = ast.parse(path.read_text(errors="replace"))
    except SyntaxError:
        return {}
    nodes = [*ast.walk(tree)]
    imports = {
        alias.asname or alias.name: node
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return {**imports, **{node.name: node for node in nodes if isinstance(node, ast.ClassDef)}}
