"""The needs that a server's source shows: the syntax trees of the modules that its entrypoint imports are searched.

Modules that the entrypoint does not reach, such as scripts that prepare data, do not count. Branches that a config never
takes do: the estimate rather names a need too many.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gymgate.gym.catalog.needs import Need, NeedKind, required_needs
from gymgate.gym.inside.resolve import ServerInstance

Signal = tuple[NeedKind, str]

_PACKAGES = ("resources_servers", "responses_api_agents", "environments", "benchmarks", "environment_servers")
_IMPORTS: dict[str, Signal] = {
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
_CALLS: dict[str, Signal] = {
    "load_dataset": ("download", "Hugging Face dataset"),
    "snapshot_download": ("download", "Hugging Face snapshot"),
    "hf_hub_download": ("download", "Hugging Face file"),
    "urlretrieve": ("download", "file by URL"),
    "urlopen": ("download", "URL"),
}
_COMMANDS: dict[tuple[str, ...], Signal] = {
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
_RELEASE = re.compile(r"https://(github\.com/[^/\s]+/[^/\s]+)/releases/download/")
_TELLING = (ast.Import, ast.ImportFrom, ast.Call, ast.List, ast.Tuple, ast.Constant)
_EVERYWHERE = {"python", "python3", "bash", "sh", "uv", "git", "curl", "npm"}


@dataclass(frozen=True)
class Module:
    """The findings in one source file."""

    imports: tuple[str, ...]
    """Dotted names. `from a import b` gives both `a` and `a.b`, which may be a module."""
    signals: tuple[Signal, ...]
    required: tuple[str, ...]
    """Fields without a default of the server's own config class."""


class CodeReader:
    """Reads server sources below some component roots; each module is parsed once."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = tuple(roots)
        self._modules: dict[Path, Module] = {}
        self._needs: dict[Path, list[Need]] = {}

    def __call__(self, server: ServerInstance, directory: Path) -> list[Need]:
        """Return the needs that the code of a server in `directory` shows, each cause once."""
        start = directory / server.entrypoint
        if start not in self._needs:
            signals: dict[Signal, str] = {}
            for path in self.reachable(directory, start):
                base = directory.parent if directory in path.parents else path.parents[1]
                for signal in self._module(path).signals:
                    signals.setdefault(signal, path.relative_to(base).as_posix())
            self._needs[start] = [Need(kind, f"{text} ({file})") for (kind, text), file in signals.items()]
        return [*required_needs(server, self._module(start).required), *self._needs[start]]

    def reachable(self, directory: Path, start: Path) -> list[Path]:
        """Return the module at `start` and all modules of its server and of the release's components that it imports."""
        modules = [start]
        for module in modules:
            for name in self._module(module).imports:
                path = self._locate(name, module, directory)
                if path is not None and path not in modules:
                    modules.append(path)
        return modules

    def _module(self, path: Path) -> Module:
        if path not in self._modules:
            self._modules[path] = read_module(parse_module(path))
        return self._modules[path]

    def _locate(self, name: str, module: Path, directory: Path) -> Path | None:
        """Return the file of a dotted import: relative, beside the server, or a component of the release."""
        dots = len(name) - len(name.lstrip("."))
        parts = [part for part in name.split(".") if part]
        if not parts:
            return None
        if dots:
            bases: Sequence[Path] = [module.parents[dots - 1]]
        else:
            bases = self._roots if parts[0] in _PACKAGES else [directory]
        stems = (base.joinpath(*parts) for base in bases)
        files = (path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py"))
        return next((path for path in files if path.is_file()), None)


def parse_module(path: Path) -> ast.Module:
    """Parse a source file. One that cannot be parsed counts as empty."""
    try:
        return _parse(path)
    except SystemError:  # by mistake, where CPython 3.11 collects garbage meanwhile (python/cpython#106905)
        return _parse(path)


def _parse(path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module(body=[], type_ignores=[])


def read_module(tree: ast.Module) -> Module:
    """Return the imports, signals and required config fields of a module."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, _TELLING)]
    imports = dict.fromkeys(name for node in nodes for name in _imports(node))
    imported = (
        signal
        for prefix, signal in _IMPORTS.items()
        if any(f"{name}.".startswith(f"{prefix}.") for name in imports)
    )
    signals = (signal for node in nodes for signal in _signals(node))
    return Module(tuple(imports), tuple(dict.fromkeys([*imported, *signals])), tuple(_required_fields(tree)))


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        yield base
        joint = "" if base.endswith(".") else "."
        yield from (f"{base}{joint}{alias.name}" for alias in node.names)


def _required_fields(tree: ast.Module) -> dict[str, None]:
    """Return required fields of the class that annotates a server's `config`, and of its bases in the same file."""
    classes = classes_of([tree])
    used = [
        field.annotation.id
        for node in classes.values()
        for name, field in _fields(node)
        if name == "config" and isinstance(field.annotation, ast.Name)
    ]
    known = [classes[name] for start in used for name in lineage(start, classes) if name in classes]
    return {name: None for node in known for name, field in _fields(node) if _is_required(field)}


def classes_of(trees: Sequence[ast.Module]) -> dict[str, ast.ClassDef]:
    """Return the top-level classes by name, the first of each name."""
    classes: dict[str, ast.ClassDef] = {}
    for node in (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)):
        classes.setdefault(node.name, node)
    return classes


def lineage(name: str, classes: Mapping[str, ast.ClassDef]) -> list[str]:
    """Return a class's name and those of its known ancestors."""
    names = [name]
    for cls in names:
        bases = classes[cls].bases if cls in classes else ()
        names += [base.id for base in bases if isinstance(base, ast.Name) and base.id not in names]
    return names


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            yield field.target.id, field


def _is_required(field: ast.AnnAssign) -> bool:
    if field.value is None:
        return "ClassVar" not in ast.unparse(field.annotation)
    if not (isinstance(field.value, ast.Call) and _callee(field.value.func) == "Field"):
        return False
    if field.value.args:
        first = field.value.args[0]
        return isinstance(first, ast.Constant) and first.value is ...
    keywords = {keyword.arg for keyword in field.value.keywords}
    return keywords.isdisjoint(("default", "default_factory", "alias", "validation_alias"))


def _signals(node: ast.AST) -> Iterator[Signal]:
    if isinstance(node, ast.Call):
        yield from _call_signals(node)
    elif isinstance(node, ast.List | ast.Tuple):
        yield from _command_signals(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 2000:
        yield from _shell_signals(node.value)


def _call_signals(call: ast.Call) -> Iterator[Signal]:
    name = _callee(call.func)
    first = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
    if name in _CALLS and first not in ("json", "csv", "parquet"):
        yield _CALLS[name]
    if name == "which" and isinstance(first, str) and first not in _EVERYWHERE:
        yield ("binary", f"looks for {first!r} on PATH")


def _callee(function: ast.expr) -> str:
    """Return the name of a called function; empty for a server's own method."""
    if isinstance(function, ast.Name):
        return function.id
    if not isinstance(function, ast.Attribute):
        return ""
    own = isinstance(function.value, ast.Name) and function.value.id in ("self", "cls")
    return "" if own else function.attr


def _command_signals(node: ast.List | ast.Tuple) -> Iterator[Signal]:
    """Yield the signal of a command's argument list. A list like `["docker", "podman"]` is a list of tools, not a command."""
    values = [item.value if isinstance(item, ast.Constant) else None for item in node.elts[:2]]
    words = tuple(value for value in values if isinstance(value, str))
    plain = len(words) > 1 and (words[1],) not in _COMMANDS and words[1] != "local"
    for command, signal in _COMMANDS.items():
        if words[: len(command)] == command and (len(command) > 1 or plain):
            yield signal


def _shell_signals(text: str) -> Iterator[Signal]:
    """Yield the signals of command lines and addresses in a string. In prose, no flag or URL follows the command."""
    if release := _RELEASE.search(text):
        yield "download", f"a release of {release[1]}"
    for command, signal in _COMMANDS.items():
        start = text.find(" ".join(command) + " ")
        if start < 0 or (start and text[start - 1] not in " \n;&|(`\"'"):
            continue
        rest = text[start:].split()[len(command) : len(command) + 1]
        if rest and (rest[0].startswith(("-", "http", "exec", "run", "{")) or "://" in rest[0]):
            yield signal
