"""What a server's code reaches for, read from its source: the modules its entrypoint imports, by syntax tree.

Only modules reachable from the entrypoint count, so that scripts which prepare data do not. A branch that a
config never takes counts all the same: this is an estimate that errs on the side of naming a need.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gymgate.catalog.model import Need, NeedKind

_PACKAGES = ("resources_servers", "responses_api_agents", "environments", "benchmarks", "environment_servers")
_IMPORTS: dict[str, tuple[NeedKind, str]] = {
    "docker": ("docker", "talks to docker"),
    "nemo_gym.sandbox": ("docker", "runs sandboxes"),
    "harbor": ("docker", "runs Harbor tasks in containers"),
    "swebench": ("docker", "runs SWE-bench containers"),
    "torch": ("gpu", "imports torch"),
    "vllm": ("gpu", "imports vLLM"),
    "tavily": ("search", "searches the web through Tavily"),
    "exa_py": ("search", "searches the web through Exa"),
    "playwright": ("binary", "drives a browser, which playwright installs apart"),
    "googleapiclient": ("search", "searches the web through Google"),
}
_CALLS: dict[str, tuple[NeedKind, str]] = {
    "load_dataset": ("download", "Hugging Face dataset"),
    "snapshot_download": ("download", "Hugging Face snapshot"),
    "hf_hub_download": ("download", "Hugging Face file"),
    "urlretrieve": ("download", "file by URL"),
    "urlopen": ("download", "URL"),
}
_COMMANDS: dict[tuple[str, ...], tuple[NeedKind, str]] = {
    ("git", "clone"): ("git", "clones a repository"),
    ("docker",): ("docker", "runs docker"),
    ("podman",): ("docker", "runs podman"),
    ("apptainer",): ("docker", "runs apptainer"),
    ("singularity",): ("docker", "runs singularity"),
    ("enroot",): ("docker", "runs enroot"),
    ("uv", "venv"): ("download", "makes a virtual environment of its own"),
    ("npm", "install"): ("download", "installs from npm"),
    ("curl",): ("download", "downloads with curl"),
}
_EVERYWHERE = {"python", "python3", "bash", "sh", "uv", "git", "curl", "npm"}


@dataclass(frozen=True)
class Module:
    """What one source file shows."""

    imports: tuple[str, ...] = ()
    """Dotted; of `from a import b` both `a` and `a.b`, which may be a module."""
    signals: tuple[tuple[NeedKind, str], ...] = ()
    required: tuple[str, ...] = ()
    """Fields without a default of the server's own config class."""


class CodeReader:
    """Reads server sources below some component roots; each module is parsed once."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)
        self._modules: dict[Path, Module] = {}

    def needs(self, directory: Path, entrypoint: str) -> list[Need]:
        """Needs that the server started by `entrypoint` in `directory` shows, each cause once."""
        found: dict[tuple[NeedKind, str], str] = {}
        for path in self.reachable(directory, directory / entrypoint):
            inside = directory in path.parents
            place = path.relative_to(directory.parent if inside else path.parents[1]).as_posix()
            for signal in self._module(path).signals:
                found.setdefault(signal, place)
        return [Need(kind, f"{detail} ({place})") for (kind, detail), place in found.items()]

    def required(self, directory: Path, entrypoint: str) -> tuple[str, ...]:
        """Fields that the server's block must have, beside those of Gym's base classes."""
        return self._module(directory / entrypoint).required

    def reachable(self, directory: Path, start: Path) -> list[Path]:
        """The module at `start` and all that it imports of its server and of the release's components."""
        pending, seen = [start], {start}
        for module in pending:
            for name in self._module(module).imports:
                for path in self._locate(name, module, directory):
                    if path not in seen:
                        seen.add(path)
                        pending.append(path)
        return pending

    def _module(self, path: Path) -> Module:
        if path not in self._modules:
            self._modules[path] = read_module(parse_module(path))
        return self._modules[path]

    def _locate(self, name: str, module: Path, directory: Path) -> Iterator[Path]:
        """Files of a dotted import: relative, a sibling of the server, or a component of the release."""
        dots = len(name) - len(name.lstrip("."))
        parts = [part for part in name.lstrip(".").split(".") if part]
        if dots:
            bases = [module.parents[dots - 1]]
        elif parts[0] in _PACKAGES:
            bases = list(self._roots)
        else:
            bases = [directory]
        for base in bases:
            for path in (base.joinpath(*parts).with_suffix(".py"), base.joinpath(*parts, "__init__.py")):
                if parts and path.is_file():
                    yield path
                    return


def parse_module(path: Path) -> ast.Module:
    """Parse a source file; an empty module if it is none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def read_module(tree: ast.Module) -> Module:
    """Imports, signals and required config fields, in one walk over the tree."""
    imports: dict[str, None] = {}
    signals: dict[tuple[NeedKind, str], None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(dict.fromkeys(_imported(node)))
        elif isinstance(node, ast.Call):
            signals.update(dict.fromkeys(_call_signals(node)))
        elif isinstance(node, ast.List | ast.Tuple):
            signals.update(dict.fromkeys(_command_signals(_leading_strings(node.elts))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 2000:
            signals.update(dict.fromkeys(_shell_signals(node.value)))
    found = (
        signal for prefix, signal in _IMPORTS.items() if any(_is_below(name, prefix) for name in imports)
    )
    return Module(tuple(imports), tuple({**dict.fromkeys(found), **signals}), tuple(_required_fields(tree)))


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = "." * node.level + (node.module or "")
    yield base
    joint = "" if base.endswith(".") else "."
    yield from (f"{base}{joint}{alias.name}" for alias in node.names)


def _required_fields(tree: ast.Module) -> Iterator[str]:
    """Of the class that the server class annotates its `config` with, and of its bases in the same file."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    used = [
        field.annotation.id
        for node in classes.values()
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and field.target.id == "config"
        and isinstance(field.annotation, ast.Name)
    ]
    names = [name for name in used if name in classes]
    for name in names:
        names += [
            base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes
        ]
        for field in classes[name].body:
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and _is_required(field)
            ):
                yield field.target.id


def _is_required(field: ast.AnnAssign) -> bool:
    if field.value is None:
        return "ClassVar" not in ast.unparse(field.annotation)
    if not (isinstance(field.value, ast.Call) and _called(field.value.func) == "Field"):
        return False
    first = field.value.args[0] if field.value.args else None
    if isinstance(first, ast.Constant):
        return first.value is ...
    given = {keyword.arg for keyword in field.value.keywords}
    return first is None and given.isdisjoint(("default", "default_factory", "alias", "validation_alias"))


def _call_signals(call: ast.Call) -> Iterator[tuple[NeedKind, str]]:
    name = _called(call.func)
    first = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    if name in _CALLS and first not in ("json", "csv", "parquet"):
        yield _CALLS[name]
    if name == "which" and isinstance(first, str) and first not in _EVERYWHERE:
        yield ("binary", f"looks for {first!r} on PATH")


def _called(function: ast.expr) -> str:
    if isinstance(function, ast.Name):
        return function.id
    if not isinstance(function, ast.Attribute):
        return ""
    own = isinstance(function.value, ast.Name) and function.value.id in ("self", "cls")
    return "" if own else function.attr


def _leading_strings(elements: Sequence[ast.expr]) -> tuple[str, ...]:
    values = [node.value if isinstance(node, ast.Constant) else None for node in elements[:2]]
    return tuple(value for value in values if isinstance(value, str))


def _command_signals(words: tuple[str, ...]) -> Iterator[tuple[NeedKind, str]]:
    for command, signal in _COMMANDS.items():
        if words[: len(command)] == command and (len(command) > 1 or _is_command_word(words)):
            yield signal


def _is_command_word(words: tuple[str, ...]) -> bool:
    """A list that starts with `docker` is a command if its second word is one, not another tool's name."""
    return len(words) > 1 and (words[1],) not in _COMMANDS and words[1] != "local"


def _shell_signals(text: str) -> Iterator[tuple[NeedKind, str]]:
    """Command lines within strings; prose about them has no flags or URLs behind the command."""
    for command, signal in _COMMANDS.items():
        start = text.find(" ".join(command) + " ")
        if start < 0 or (start and text[start - 1] not in " \n;&|(`\"'"):
            continue
        rest = text[start:].split()[len(command) : len(command) + 1]
        if rest and (rest[0].startswith(("-", "http", "exec", "run", "{")) or "://" in rest[0]):
            yield signal
